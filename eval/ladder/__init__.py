"""How far each layer of a converted model is from its source, stage by stage, and which of it is a fault."""
