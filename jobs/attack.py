"""Run the attack stage as a Ray job: `ray job submit --working-dir . -- python jobs/attack.py CONFIG [options]`."""

from mixednuts_dist.cli import attack

if __name__ == "__main__":
    attack()
