"""Power loss: changes of files are recorded, and the disk states that a crash may leave are built from them."""
