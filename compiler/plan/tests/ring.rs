//! Rings of slots with contents, for the interpreter.

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slot {
    Free,
    /// Posted, or computed and not yet offered.
    Claimed(u64),
    /// Received and not yet released; for send rings: offered.
    Ready(u64),
}

#[derive(Clone, Debug)]
pub struct Ring {
    pub slots: Vec<Slot>,
    pub taken: u32,
    pub most: u32,
}

impl Ring {
    pub fn new(slots: u32) -> Self {
        Ring { slots: vec![Slot::Free; slots as usize], taken: 0, most: 0 }
    }

    pub fn at(&mut self, mb: u64) -> Result<&mut Slot, String> {
        let n = self.slots.len() as u64;
        if n == 0 { Err("a ring without slots".into()) } else { Ok(&mut self.slots[(mb % n) as usize]) }
    }

    pub fn claim(&mut self, mb: u64, what: &str) -> Result<(), String> {
        let slot = self.at(mb)?;
        if *slot != Slot::Free {
            return Err(format!("{what} of {mb} finds {slot:?}"));
        }
        *slot = Slot::Claimed(mb);
        self.taken += 1;
        self.most = self.most.max(self.taken);
        Ok(())
    }

    pub fn ready(&mut self, mb: u64, what: &str) -> Result<(), String> {
        let slot = self.at(mb)?;
        if *slot != Slot::Claimed(mb) {
            return Err(format!("{what} of {mb} finds {slot:?}"));
        }
        *slot = Slot::Ready(mb);
        Ok(())
    }

    pub fn release(&mut self, mb: u64, what: &str) -> Result<(), String> {
        let slot = self.at(mb)?;
        match *slot {
            Slot::Claimed(m) | Slot::Ready(m) if m == mb => *slot = Slot::Free,
            other => return Err(format!("{what} of {mb} releases {other:?}")),
        }
        self.taken -= 1;
        Ok(())
    }
}

/// What is not there: false while it may come.
pub fn waits(slot: Slot, mb: u64, in_place: bool) -> Result<bool, String> {
    if slot == Slot::Claimed(mb) && !in_place {
        return Ok(false);
    }
    Err(format!("waits for {mb}, which nothing will bring: {slot:?}"))
}
