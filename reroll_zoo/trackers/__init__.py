"""Where a run's numbers may go beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, MLflow and OpenTelemetry."""
