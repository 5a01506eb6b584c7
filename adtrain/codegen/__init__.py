"""C text for generated code, the same for C on the CPU and CUDA C++ on the GPU."""
