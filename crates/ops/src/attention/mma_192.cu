// Attention on tensor cores for heads of up to 192 features.
#include "dev.cuh"
#include "tiles.cuh"
#include "mma.cuh"
#include "mma_tiles.cuh"
#include "mma_forward.cuh"
#include "mma_backward.cuh"

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_forward_192)(FORWARD_PARAMETERS) {
    forward<192, 192, 1, 32, act>(FORWARD_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_queries_192)(QUERIES_PARAMETERS) {
    backward_queries<192, 192, 1, 32, act>(QUERIES_ARGUMENTS);
}

KERNEL __launch_bounds__(MMA_THREADS) TYPED(attention_mma_keys_192)(KEYS_PARAMETERS) {
    backward_keys<192, 192, 1, 32, false, act>(KEYS_ARGUMENTS);
}
