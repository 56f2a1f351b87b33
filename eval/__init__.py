"""How close a converted checkpoint is to its source, measured from the files with stock transformers."""
