"""Sequential MNIST: one recurrent layer reads an image pixel by pixel; the test images are corrupted in three ways."""
