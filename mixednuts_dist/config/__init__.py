"""The configuration of a run, the registers of extension points, and URIs."""
