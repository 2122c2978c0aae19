"""What the kernels in Mosaic GPU share."""

#: The machines they are made for.
TARGETS = ("h100", "h200")
