"""Both container images, built without a registry and run: `make image-test`. Not part of the test suite."""
