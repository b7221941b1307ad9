"""Run all stages as a Ray job: `ray job submit --working-dir . -- python jobs/run.py CONFIG [options]`."""

from mixednuts_dist.cli import run

if __name__ == "__main__":
    run()
