// Images in halves, for several convolutions that read them: what is known of each, and their lines. Read scaled.cuh first.
#ifndef MEASURING
#define MEASURING 256 // threads of a block that measures
#endif
#include "scaled.cuh"

// A block an image.
KERNEL __launch_bounds__(MEASURING) measure_images(const T *x, char *y, int64_t batch) {
    wait_for_inputs();
    const Laid laid(y, batch, IN_CHANNELS, FRONT);
    measure_image<Inputs::SIZE, MEASURING>(laid.known[blockIdx.x], x + (int64_t)blockIdx.x * Inputs::SIZE);
}

// As in lay_halves.cu.
KERNEL __launch_bounds__(LAYING) lay_images(const T *x, char *y, int64_t batch) {
    wait_for_inputs();
    const Laid laid(y, batch, IN_CHANNELS, FRONT);
    lay(Inputs{x, (int)batch}, laid, (gridDim.x - 1 - blockIdx.x) * LAID, blockIdx.y);
}
