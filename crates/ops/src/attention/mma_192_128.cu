// Attention on tensor cores for heads of up to 192 features, whose values have up to 128.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_192_128)(FORWARD_PARAMETERS) {
    forward<192, 128, 1, 64, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_192_128)(QUERIES_PARAMETERS) {
    backward_queries<192, 128, 1, 16, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_192_128)(KEYS_PARAMETERS) {
    backward_keys<192, 128, 1, 32, false, act>(KEYS_ARGUMENTS);
}
