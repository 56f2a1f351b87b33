"""From a source checkpoint to an MLA checkpoint: read, calibrate, select, factorise, write, check."""
