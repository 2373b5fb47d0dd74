// Attention on tensor cores for heads of up to 256 features.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_256)(FORWARD_PARAMETERS) {
    forward<256, 256, 1, 32, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_256)(QUERIES_PARAMETERS) {
    backward_queries<256, 256, 1, 16, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_256)(KEYS_PARAMETERS) {
    backward_keys<256, 256, 1, 16, false, act>(KEYS_ARGUMENTS);
}
