"""Read files on the disks of the nodes of a Ray cluster."""
