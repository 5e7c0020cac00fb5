"""Loss and accuracy of the sequential MNIST runs against the learning rate."""
