"""Power loss: record changes of files, then check the disk states that a crash may leave."""
