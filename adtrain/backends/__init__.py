"""Devices. Each folder is one backend; none of them is imported by `adtrain.ops`."""
