//! How a matmul's tiles cut its problem: which loops there are and what is packed. Workspace and code generation both read it here.
//!
//! # Loops, outermost first
//!
//! 1. panels of `nc` columns; B's panel is packed here, for all of k
//! 2. panels of `mc` rows; A's panel is packed here, for all of k
//! 3. register tiles of `nr` columns
//! 4. register tiles of `mr` rows; C's tile is finished here: the epilogue sees whole sums
//! 5. blocks of `kc` of k (unrolled, each with its own packed parts), each summed from zero
//! 6. steps of `kr`
//!
//! A loop that would go round once does not exist. An operand is packed if its tiles depend on a loop between its panel and the step
//! of k; packed tiles are whole, zeros outside the matrix. Packing all of k keeps a tile's sum in registers up to its
//! epilogue, which costs `4 k (mc + nc)` bytes.

use crate::kernel::{MatMul, Tiles};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocking {
    /// Whether each loop over C exists, in the order above.
    pub column_panels: bool,
    pub row_panels: bool,
    pub column_tiles: bool,
    pub row_tiles: bool,
    /// Rows and columns of a panel: at most the problem, rounded up to register tiles.
    pub mc: u32,
    pub nc: u32,
    /// The blocks of k, ascending; they cover it.
    pub k_blocks: Vec<KBlock>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KBlock {
    pub start: u32,
    pub len: u32,
    /// Whether there is a loop over steps of `kr`.
    pub steps: bool,
}

impl Blocking {
    pub fn new(matmul: &MatMul, tiles: &Tiles) -> Self {
        let &MatMul { m, n, k, .. } = matmul;
        let mc = tiles.mc.min(m.next_multiple_of(tiles.mr));
        let nc = tiles.nc.min(n.next_multiple_of(tiles.nr));
        let k_blocks = (0..k)
            .step_by(tiles.kc as usize)
            .map(|start| {
                let len = tiles.kc.min(k - start);
                KBlock { start, len, steps: tiles.kr < len }
            })
            .collect();
        Self {
            column_panels: nc < n,
            row_panels: mc < m,
            column_tiles: tiles.nr < nc,
            row_tiles: tiles.mr < mc,
            mc,
            nc,
            k_blocks,
        }
    }

    /// Whether A's (B's) tiles of a block are packed.
    pub fn packs_a(&self, block: &KBlock) -> bool {
        self.row_tiles || block.steps
    }

    pub fn packs_b(&self, block: &KBlock) -> bool {
        self.column_tiles || block.steps
    }

    /// Bytes of the packed panels, each rounded up to 64.
    ///
    /// Panels of equal size share memory where they are packed right before the only loop that reads them, that is, where no other
    /// loop lies between.
    pub fn packed_bytes(&self, tiles: &Tiles) -> u64 {
        let a_shares = !self.row_tiles && !self.column_tiles;
        let b_shares = a_shares && !self.row_panels;
        let lens = |packs: fn(&Self, &KBlock) -> bool| {
            self.k_blocks
                .iter()
                .filter(move |block| packs(self, block))
                .map(|block| block.len.next_multiple_of(tiles.kr))
        };
        panels(lens(Self::packs_a), self.mc, a_shares) + panels(lens(Self::packs_b), self.nc, b_shares)
    }
}

/// Bytes of panels of `extent` rows or columns.
fn panels(lens: impl Iterator<Item = u32>, extent: u32, shared: bool) -> u64 {
    let mut lens = lens.collect::<Vec<_>>();
    if shared {
        // Ascending blocks: equal ones are neighbours.
        lens.dedup();
    }
    lens.into_iter().map(|len| (4 * u64::from(extent) * u64::from(len)).next_multiple_of(64)).sum()
}
