"""What the torchair lowering knows of Ascend: operators, rewrites, streams, converters, hook."""
