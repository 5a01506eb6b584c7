"""C text that generated code is made of, the same for C on the CPU and CUDA C++ on the GPU."""
