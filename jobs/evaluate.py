"""Run the evaluate stage as a Ray job: `ray job submit --working-dir . -- python jobs/evaluate.py CONFIG [options]`."""

from mixednuts_dist.cli import evaluate

if __name__ == "__main__":
    evaluate()
