// Lays images out for conv_halves.cu. Read halves.cuh first.
#include "halves.cuh"

// What was measured last comes first, as much of it is in the second cache; what is multiplied first comes last. All chunks
// of the same positions are neighbours, as they are in images.
KERNEL __launch_bounds__(LAYING) lay_halves(
    const T *x, const T *w, const Epilogue epilogue, int64_t batch, char *scratch) {
    const Laid laid = laid_images(Made(scratch), batch);
    const int at = gridDim.x - 1 - blockIdx.x;
    lay(Inputs{x, (int)batch}, laid, at / laid.chunks * LAID, at % laid.chunks);
}
