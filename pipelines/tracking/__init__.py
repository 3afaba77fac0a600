"""What MLflow is told. `tracker` is what a run holds; `channel` and `backlog` deliver its records, `mlflow_runs` and `mlflow_writes` know MLflow."""
