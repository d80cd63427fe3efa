"""What a run writes and shows: `records` the files, `progress` the terminal, `flops` the MFU."""
