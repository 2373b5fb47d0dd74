//! Tiles of AMX, which some processors multiply as a whole: sixteen rows of 32 bfloat16 numbers, and sixteen rows of sixteen sums in float32.
//!
//! Formulas and layouts: Intel's Software Developer's Manual, volume 2, `TDPBF16PS`, `TILELOADD`, and `LDTILECFG`. The system lends
//! the registers to a process that asks for them: `Documentation/arch/x86/xstate.rst` of the Linux kernel.

/// Numbers along the sum that one instruction multiplies.
pub(crate) const STEP: usize = 32;

/// Bfloat16 numbers that add up to one of float32: bf16x3, as Henry, Tang, and Heinecke describe it (arXiv:1904.06376).
pub(crate) const SPLIT: usize = 3;

/// Pairs of so many numbers along the sum, padded to whole tiles.
pub(crate) const fn pairs(numbers: usize) -> usize {
    numbers.div_ceil(STEP) * (STEP / 2)
}

/// Products of tiles that are summed one after the other: of up to two tiles of one matrix, thirty-two rows, with up to two tiles of
/// the other, thirty-two columns.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TilePart {
    /// The first of 16 or 32 rows of bfloat16 numbers; or packed, `[step][32 rows][STEP]`.
    pub(crate) rows: *const u8,
    /// Bytes from one row to the next.
    pub(crate) apart: usize,
    /// The two blocks of sixteen columns, in pairs of rows: `[pair][16 columns][2]`; or split, `[step][SPLIT][16 pairs][16 columns][2]`.
    pub(crate) columns: [*const u8; 2],
    /// How many times [`STEP`] numbers the sum has; at least one.
    pub(crate) steps: usize,
}

/// Where the sums of four tiles are.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct TileSums {
    /// What they start with: the upper two tiles, then the lower two. Null: all start with zero.
    pub(crate) from: [*const f32; 4],
    /// Where they go.
    pub(crate) to: [*mut f32; 4],
    /// Bytes from one row to the next, in both.
    pub(crate) apart: usize,
}

impl TileSums {
    /// Four places: `down` floats from the upper tiles to the lower, `right` from the left to the right.
    pub(crate) const fn places(first: *mut f32, down: usize, right: usize) -> [*mut f32; 4] {
        let lower = first.wrapping_add(down);
        [first, first.wrapping_add(right), lower, lower.wrapping_add(right)]
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod tiles {
    use super::{SPLIT, TilePart, TileSums};
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    use std::sync::OnceLock;

    /// Whether the processor has tiles of bfloat16, and the system lets this process use them. Asks the system once.
    pub(crate) fn usable() -> bool {
        static USABLE: OnceLock<bool> = OnceLock::new();
        *USABLE.get_or_init(|| has_tiles() && permitted())
    }

    fn has_tiles() -> bool {
        const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
        __cpuid(0).eax >= 7
            && __cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16
            && std::is_x86_feature_detected!("avx512bf16")
            && std::is_x86_feature_detected!("avx512bw")
    }

    /// Asks the system for the registers, as `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)` does; an old system has no such call.
    fn permitted() -> bool {
        const ARCH_PRCTL: usize = 158;
        const REQUEST: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: a call of the system that reads and writes none of our memory; it changes the registers that are named.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") result, in("rdi") REQUEST, in("rsi") TILE_DATA,
                lateout("rcx") _, lateout("r11") _, options(nostack)
            );
        }
        result == 0
    }

    /// Bytes of a tile, and of a row of it.
    const BYTES: usize = 1024;
    const ROW: usize = 64;

    /// What `LDTILECFG` reads: eight tiles of sixteen rows of 64 bytes.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    static CONFIGURATION: Configuration = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut tile = 0;
        while tile < 8 {
            row_bytes[tile] = 64;
            rows[tile] = 16;
            tile += 1;
        }
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };

    /// A line of a kernel, or nothing where it lacks a tile for it.
    macro_rules! line {
        (yes, $line:expr) => {
            $line
        };
        (yes yes, $line:expr) => {
            $line
        };
        ($($other:ident)+, $line:expr) => {
            ""
        };
    }

    /// Asks for eight lines from a byte on. What lies there may be no memory at all: the processor ignores that.
    macro_rules! ahead {
        ($from:literal, $at:literal) => {
            lines!("prefetcht0", $from, $at)
        };
    }

    /// As `ahead`, for what is written soon.
    macro_rules! ahead_to_write {
        ($from:literal) => {
            lines!("prefetchw", $from, "0")
        };
    }

    macro_rules! lines {
        ($hint:literal, $from:literal, $at:literal) => {
            concat!(
                ".irp byte, 0, 64, 128, 192, 256, 320, 384, 448\n",
                $hint,
                " [{",
                $from,
                "} + \\byte + ",
                $at,
                "]\n",
                ".endr\n"
            )
        };
    }

    /// As many instructions as `ahead` has. Without them, products of tiles were slower by a third while another thread shared the core.
    macro_rules! pause {
        () => {
            ".rept 8\nnop\n.endr\n"
        };
    }

    /// The products of the rows that were loaded with a tile of each block of columns, at so many bytes of it, and what stands between them.
    macro_rules! part {
        ($at:literal, [$($between:expr),+], right: $right:ident, lower: $lower:ident) => {
            part!(@ $at, $($between),+, $right, $lower)
        };
        (@ $at:literal, $first:expr, $second:expr, $third:expr, $fourth:expr, $right:ident, $lower:ident) => {
            concat!(
                "tileloadd tmm6, [{left} + {line} + ",
                $at,
                "]\n",
                $first,
                "tdpbf16ps tmm0, tmm4, tmm6\n",
                line!($right, concat!("tileloadd tmm7, [{right} + {line} + ", $at, "]\n")),
                $second,
                line!($right, "tdpbf16ps tmm1, tmm4, tmm7\n"),
                $third,
                line!($lower, "tdpbf16ps tmm2, tmm5, tmm6\n"),
                $fourth,
                line!($right $lower, "tdpbf16ps tmm3, tmm5, tmm7\n"),
            )
        };
    }

    /// The rows of a step, which stay for all of its parts.
    macro_rules! rows {
        ($lower:ident) => {
            concat!("tileloadd tmm4, [{upper} + {apart}]\n", line!($lower, "tileloadd tmm5, [{lower} + {apart}]\n"))
        };
    }

    /// A step of rows that are packed or stay in the cache, while columns come: they are asked for two steps ahead.
    macro_rules! streamed {
        (right: $right:ident, lower: $lower:ident) => {
            concat!(
                "/* nothing comes next: {next} {other} */\n",
                rows!($lower),
                part!(
                    0,
                    [
                        ahead!("left", "2048"),
                        ahead!("left", "2560"),
                        line!($right, ahead!("right", "2048")),
                        line!($right, ahead!("right", "2560"))
                    ],
                    right: $right, lower: $lower
                )
            )
        };
    }

    /// A step of packed rows, while columns stay in the cache: rows are asked for two steps ahead, and some of the next sums.
    macro_rules! packed {
        (right: $right:ident, lower: $lower:ident) => {
            concat!(
                rows!($lower),
                part!(
                    0,
                    [
                        ahead!("upper", "4096"),
                        concat!(ahead!("upper", "4608"), quarter!("next")),
                        ahead!("upper", "5120"),
                        concat!(ahead!("upper", "5632"), quarter!("other"))
                    ],
                    right: $right, lower: $lower
                ),
                "add {next}, [{sums} + 72]\n",
                "add {other}, [{sums} + 72]\n",
            )
        };
    }

    /// The same of split columns: rows are asked for one step ahead, and some of the next sums.
    macro_rules! split {
        (right: $right:ident, lower: $lower:ident) => {
            concat!(
                rows!($lower),
                part!(
                    0,
                    [ahead!("upper", "2048"), ahead!("upper", "2560"), ahead!("upper", "3072"), ahead!("upper", "3584")],
                    right: $right, lower: $lower
                ),
                part!(
                    1024,
                    [ahead_to_write!("next"), ahead_to_write!("other"), pause!(), pause!()],
                    right: $right, lower: $lower
                ),
                part!(2048, [pause!(), pause!(), pause!(), pause!()], right: $right, lower: $lower),
                "add {next}, [{sums} + 72]\n",
                "add {other}, [{sums} + 72]\n",
            )
        };
    }

    /// Four lines of the next sums.
    macro_rules! quarter {
        ($from:literal) => {
            concat!(".irp byte, 0, 64, 128, 192\n", "prefetchw [{", $from, "} + \\byte]\n", ".endr\n")
        };
    }

    /// Multiplies parts in steps with so many bytes of rows and of each block of columns.
    macro_rules! multiply_all {
        ($step:ident, [$rows:expr, $columns:expr], $sums:ident, $parts:ident, $size:ident, $next:expr) => {{
            let next: [*const f32; 2] = $next;
            match $size {
                [2, 2] => multiply!($step, [$rows, $columns], $sums, $parts, next, right: yes, lower: yes),
                [2, _] => multiply!($step, [$rows, $columns], $sums, $parts, next, right: no, lower: yes),
                [_, 2] => multiply!($step, [$rows, $columns], $sums, $parts, next, right: yes, lower: no),
                _ => multiply!($step, [$rows, $columns], $sums, $parts, next, right: no, lower: no),
            }
        }};
    }

    /// The sums of up to four tiles: `tmm0` and `tmm1` the upper ones, `tmm2` and `tmm3` the lower. `tmm4` and `tmm5` are rows, `tmm6` and
    /// `tmm7` columns.
    macro_rules! multiply {
        ($step:ident, [$rows:expr, $columns:expr], $sums:expr, $parts:expr, $next:ident, right: $right:ident, lower: $lower:ident) => {
            asm!(
                "mov {apart}, [{sums} + 64]",
                "mov {at}, [{sums}]",
                "test {at}, {at}",
                "jz 22f",
                "tileloadd tmm0, [{at} + {apart}]",
                line!($right, "mov {at}, [{sums} + 8]"),
                line!($right, "tileloadd tmm1, [{at} + {apart}]"),
                line!($lower, "mov {at}, [{sums} + 16]"),
                line!($lower, "tileloadd tmm2, [{at} + {apart}]"),
                line!($right $lower, "mov {at}, [{sums} + 24]"),
                line!($right $lower, "tileloadd tmm3, [{at} + {apart}]"),
                "jmp 23f",
                "22:",
                "tilezero tmm0",
                line!($right, "tilezero tmm1"),
                line!($lower, "tilezero tmm2"),
                line!($right $lower, "tilezero tmm3"),
                "23:",
                "test {count}, {count}",
                "jz 26f",
                "24:",
                "mov {upper}, [{part}]",
                "mov {apart}, [{part} + 8]",
                "mov {left}, [{part} + 16]",
                "mov {right}, [{part} + 24]",
                "mov {steps}, [{part} + 32]",
                "mov {lower}, {apart}",
                "shl {lower}, 4",
                "add {lower}, {upper}",
                "25:",
                $step!(right: $right, lower: $lower),
                "add {upper}, {rows}",
                "add {lower}, {rows}",
                "add {left}, {columns}",
                "add {right}, {columns}",
                "dec {steps}",
                "jnz 25b",
                "add {part}, 40",
                "dec {count}",
                "jnz 24b",
                "26:",
                "mov {apart}, [{sums} + 64]",
                "mov {at}, [{sums} + 32]",
                "tilestored [{at} + {apart}], tmm0",
                line!($right, "mov {at}, [{sums} + 40]"),
                line!($right, "tilestored [{at} + {apart}], tmm1"),
                line!($lower, "mov {at}, [{sums} + 48]"),
                line!($lower, "tilestored [{at} + {apart}], tmm2"),
                line!($right $lower, "mov {at}, [{sums} + 56]"),
                line!($right $lower, "tilestored [{at} + {apart}], tmm3"),
                sums = in(reg) $sums,
                part = inout(reg) $parts.as_ptr() => _,
                count = inout(reg) $parts.len() => _,
                line = in(reg) 64usize,
                rows = const $rows,
                columns = const $columns,
                next = inout(reg) $next[0] => _,
                other = inout(reg) $next[1] => _,
                at = out(reg) _,
                apart = out(reg) _,
                upper = out(reg) _,
                lower = out(reg) _,
                left = out(reg) _,
                right = out(reg) _,
                steps = out(reg) _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            )
        };
    }

    /// Sums, and how many bytes of each run of the next ones a step goes ahead.
    #[repr(C)]
    struct Ahead {
        sums: TileSums,
        each: usize,
    }

    /// The tile registers of a thread, in use until this is dropped.
    pub(crate) struct Tiles(std::marker::PhantomData<*const ()>);

    impl Tiles {
        /// # Safety
        /// [`usable`] is true.
        pub(crate) unsafe fn begin() -> Self {
            // SAFETY: the processor has the instruction, as the caller says; it reads 64 bytes, which are a valid configuration.
            unsafe {
                asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, preserves_flags, readonly));
            }
            Self(std::marker::PhantomData)
        }

        /// Adds the products of `parts` to up to four tiles of sums: `size` is one or two from top to bottom, and from left to right.
        ///
        /// # Safety
        /// The places of `sums` that `size` has are sixteen rows of sixteen floats each, and those to write are no other thread's. Of each
        /// part, as many rows have `steps` times 64 bytes, and as many blocks of columns `steps` times 1,024.
        #[inline]
        #[allow(clippy::unused_self, reason = "it shows that the registers are configured")]
        pub(crate) unsafe fn add_products(&self, sums: &TileSums, parts: &[TilePart], size: [usize; 2]) {
            // SAFETY: `self` shows that the registers are configured, sixteen rows of 64 bytes each. What is read and written is there, as
            // the caller says; `parts` has as many entries as are read, and the structures lie as `repr(C)` says.
            unsafe { multiply_all!(streamed, [ROW, BYTES], sums, parts, size, [std::ptr::null(); 2]) }
        }

        /// As [`Tiles::add_products`], of parts whose rows are packed, and whose columns may be `split`. Meanwhile, asks for thirty-two rows of
        /// sums at each place of `next`, or for most of them; they need not be there.
        ///
        /// # Safety
        /// As there, but of rows, there are `steps` times 2,048 bytes, and of split columns [`SPLIT`] times the bytes.
        #[inline]
        #[allow(clippy::unused_self, reason = "it shows that the registers are configured")]
        pub(crate) unsafe fn add_packed_products(
            &self,
            sums: &TileSums,
            parts: &[TilePart],
            size: [usize; 2],
            split: bool,
            next: [*const f32; 2],
        ) {
            let steps = parts.iter().map(|part| part.steps).sum::<usize>().max(1);
            // Whole lines of memory, at most as many as a step asks for.
            let each = (2 * BYTES).div_ceil(steps).next_multiple_of(64).min(if split { 512 } else { 256 });
            let sums = &Ahead { sums: *sums, each };
            // SAFETY: as there; `Ahead` begins with the sums.
            unsafe {
                if split {
                    multiply_all!(split, [2 * BYTES, SPLIT * BYTES], sums, parts, size, next);
                } else {
                    multiply_all!(packed, [2 * BYTES, BYTES], sums, parts, size, next);
                }
            }
        }
    }

    impl Drop for Tiles {
        fn drop(&mut self) {
            // SAFETY: the registers were configured by this thread, and nothing is left in them.
            unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
mod tiles {
    use super::{TilePart, TileSums};

    /// Only Linux on this architecture lends tiles.
    pub(crate) const fn usable() -> bool {
        false
    }

    /// Never made.
    pub(crate) enum Tiles {}

    impl Tiles {
        /// # Safety
        /// [`usable`] is true, which it never is.
        pub(crate) unsafe fn begin() -> Self {
            unreachable!("no processor of this architecture has tiles")
        }

        /// # Safety
        /// None.
        pub(crate) unsafe fn add_products(&self, _: &TileSums, _: &[TilePart], _: [usize; 2]) {
            match *self {}
        }

        /// # Safety
        /// None.
        pub(crate) unsafe fn add_packed_products(
            &self,
            _: &TileSums,
            _: &[TilePart],
            _: [usize; 2],
            _: bool,
            _: [*const f32; 2],
        ) {
            match *self {}
        }
    }
}

pub(crate) use tiles::{Tiles, usable};
