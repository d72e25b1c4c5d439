"""What every other package uses: errors, files, text, statistics, clocks, threads, kernels, the machine."""
