"""What probes of NVIDIA GPUs are built with: typed templates of CUDA C++, NVRTC, the device, and checks on the code."""
