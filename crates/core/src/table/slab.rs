//! A slab: a vector with free slots, whose small ids stay valid, without an allocation for each item.
//!
//! In pieces, so that growing past a million moves nothing and never needs room for two millions.

const PIECE: usize = 4096;

#[derive(Clone, Debug)]
pub(super) struct Slab<T> {
    pieces: Vec<Vec<Option<T>>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { pieces: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn insert(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(id) => {
                let cell = &mut self.pieces[id as usize / PIECE][id as usize % PIECE];
                debug_assert!(cell.is_none());
                *cell = Some(item);
                id
            }
            None => {
                if self.pieces.last().is_none_or(|piece| piece.len() == PIECE) {
                    // A small table stays small: its only piece grows as it must.
                    let room = if self.pieces.is_empty() { 0 } else { PIECE };
                    self.pieces.push(Vec::with_capacity(room));
                }
                let full = (self.pieces.len() - 1) * PIECE;
                let piece = self.pieces.last_mut().expect("a piece with room");
                piece.push(Some(item));
                u32::try_from(full + piece.len() - 1).expect("fewer than 2^32 items")
            }
        }
    }

    pub fn remove(&mut self, id: u32) -> T {
        let item = self.pieces[id as usize / PIECE][id as usize % PIECE].take().expect("a live id");
        self.free.push(id);
        item
    }

    pub fn len(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum::<usize>() - self.free.len()
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, id: u32) -> &T {
        self.pieces[id as usize / PIECE][id as usize % PIECE].as_ref().expect("a live id")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        self.pieces[id as usize / PIECE][id as usize % PIECE].as_mut().expect("a live id")
    }
}
