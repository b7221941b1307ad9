"""Run the report stage as a Ray job: `ray job submit --working-dir . -- python jobs/report.py CONFIG [options]`."""

from mixednuts_dist.cli import report

if __name__ == "__main__":
    report()
