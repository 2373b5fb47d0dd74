// What a block of an attention kernel works on, as `cuda.rs` lists it.
// A tile of queries: the first one's row, how many, the token of the sequence's first key, and the keys, counted from
// there, that any of them sees.
struct QueryTile {
    u32 row, queries, key_row, from, to;
};

// A tile of keys: the first one's token and its number in the sequence, how many, the row of the sequence's first
// query, and the queries, counted from there, between the first and the last that see any of the keys.
struct KeyTile {
    u32 token, key, keys, row, from, to;
};
