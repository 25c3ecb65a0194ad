//! A vector with holes: small ids that stay put, and no allocation for each item.

#[derive(Clone, Debug)]
pub(super) struct Slab<T> {
    cells: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { cells: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    pub fn insert(&mut self, item: T) -> u32 {
        match self.free.pop() {
            Some(id) => {
                debug_assert!(self.cells[id as usize].is_none());
                self.cells[id as usize] = Some(item);
                id
            }
            None => {
                let id = u32::try_from(self.cells.len()).expect("fewer than 2^32 items");
                self.cells.push(Some(item));
                id
            }
        }
    }

    pub fn remove(&mut self, id: u32) -> T {
        let item = self.cells[id as usize].take().expect("a live id");
        self.free.push(id);
        item
    }

    pub fn len(&self) -> usize {
        self.cells.len() - self.free.len()
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;
    fn index(&self, id: u32) -> &T {
        self.cells[id as usize].as_ref().expect("a live id")
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, id: u32) -> &mut T {
        self.cells[id as usize].as_mut().expect("a live id")
    }
}
