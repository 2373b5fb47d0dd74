// Row norms of a weight with a low-rank update, a thread a row.
#include "dev.cuh"

// out[j] = sqrt(squares[j] + 2 s (A W^T)[., j] . B_j + s^2 B_j (A A^T) B_j^T): aw [rank, rows], aa [rank, rank], b [rows, rank]
KERNEL low_rank_row_norms(const double* squares, const float* b, const float* aw, const float* aa, double scale, float* out, u64 rows,
                          u64 rank) {
    u64 row = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    b += row * rank;
    double cross = 0.0, own = 0.0;
    for (u64 k = 0; k < rank; k++) {
        double value = double(b[k]), along = 0.0;
        cross += value * double(aw[k * rows + row]);
        for (u64 l = 0; l < rank; l++) along += double(aa[k * rank + l]) * double(b[l]);
        own += value * along;
    }
    double square = squares[row] + scale * (2.0 * cross + scale * own);
    out[row] = float(sqrt(square > 0.0 ? square : 0.0));
}
