"""Where a run's metrics go besides its own files: the console, TensorBoard, Trackio, Weights & Biases."""
