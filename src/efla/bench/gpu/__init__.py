"""What a GPU user can check: kernels compiled ahead of time, conformance, throughput; and the roofline as arithmetic.

Nothing here is imported by ``import efla``, and Triton only inside the functions that need it.
"""
