"""Cache, speed and memory of a converted model beside its source."""
