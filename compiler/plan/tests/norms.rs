//! Sums of squares on their way, for the interpreter: places with contents. A content is an update and how many stages, from the
//! first on, have added their squares. Stages of one rank that follow each other have one place for the sum, and one for the total;
//! on those up to the last stage these two are one.

/// Up to the last stage, or back from it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Up,
    Down,
}

#[derive(Clone, Debug, Default)]
struct Place {
    content: Option<(u64, usize)>,
    posted: Option<u64>,
    /// By whom.
    offered: Option<usize>,
}

pub struct Norms {
    /// By stage: the first and the last of those that it shares its places with.
    runs: Vec<(usize, usize)>,
    up: Vec<Place>,
    down: Vec<Place>,
    /// By stage: how many updates it has found the total of.
    found: Vec<u64>,
}

type Checked<T = ()> = Result<T, String>;

impl Norms {
    pub fn new(homes: &[usize]) -> Norms {
        let same = |a: usize, b: usize| homes[a.min(b)..=a.max(b)].iter().all(|home| *home == homes[a]);
        let all = || 0..homes.len();
        let run = |s| (all().find(|other| same(*other, s)).unwrap(), all().rfind(|other| same(s, *other)).unwrap());
        let places = vec![Place::default(); homes.len()];
        Norms { runs: all().map(run).collect(), up: places.clone(), down: places, found: vec![0; homes.len()] }
    }

    fn stages(&self) -> usize {
        self.runs.len()
    }

    fn place(&mut self, s: usize, way: Way) -> &mut Place {
        let (first, last) = self.runs[s];
        match way {
            Way::Down if last + 1 < self.stages() => &mut self.down[first],
            _ => &mut self.up[first],
        }
    }

    /// Something else is written there from now on: `versions` are the updates that each stage has made.
    fn claim(&mut self, s: usize, way: Way, u: u64, versions: &[u64]) -> Checked {
        let (first, last) = self.runs[s];
        if versions[first..=last].iter().any(|made| *made < u) {
            return Err(format!("{way:?} {u} is written before all have read it: {:?}", &versions[first..=last]));
        }
        let place = self.place(s, way);
        if place.offered.is_some() || place.posted.is_some() {
            return Err(format!("{way:?} {u} is written while it is sent or received: {place:?}"));
        }
        place.content = None;
        Ok(())
    }

    pub fn post(&mut self, s: usize, way: Way, u: u64, versions: &[u64]) -> Checked {
        self.claim(s, way, u, versions)?;
        self.place(s, way).posted = Some(u);
        Ok(())
    }

    /// Before N: false while the sum of the stages before is on its way.
    pub fn begin(&mut self, s: usize, u: u64, versions: &[u64]) -> Checked<bool> {
        if s == 0 {
            self.claim(s, Way::Up, u, versions)?;
            self.place(s, Way::Up).content = Some((u, 0));
        }
        self.there(s, Way::Up, u, s)
    }

    /// Whether the squares of so many stages are there; false while they may come.
    pub fn there(&mut self, s: usize, way: Way, u: u64, of: usize) -> Checked<bool> {
        let place = self.place(s, way);
        match place.content {
            Some(content) if content == (u, of) => Ok(true),
            None if place.posted == Some(u) => Ok(false),
            _ => Err(format!("{way:?} of {of} stages waits for what nothing will bring: {place:?}")),
        }
    }

    /// Before T: false while the total is on its way. The next stage of the rank finds it before.
    pub fn total(&mut self, s: usize, u: u64) -> Checked<bool> {
        let (all, (_, last)) = (self.stages(), self.runs[s]);
        if s < last && self.found[s + 1] != u + 1 {
            return Err(format!("the total of {u} is looked for before the next stage has it"));
        }
        self.there(s, Way::Down, u, all)
    }

    /// T, or N of the last stage.
    pub fn find(&mut self, s: usize, u: u64) {
        self.found[s] = u + 1;
    }

    /// Before U: T was performed, and what is read is the total.
    pub fn known(&mut self, s: usize, u: u64) -> Checked {
        let all = self.stages();
        let there = self.there(s, Way::Down, u, all)?;
        if there && self.found[s] == u + 1 { Ok(()) } else { Err(format!("update {u} before its total")) }
    }

    /// N has added.
    pub fn add(&mut self, s: usize, u: u64) {
        self.place(s, Way::Up).content = Some((u, s + 1));
        if s + 1 == self.stages() {
            self.find(s, u);
        }
    }

    pub fn offer(&mut self, s: usize, way: Way, u: u64) -> Checked {
        let of = if way == Way::Up { s + 1 } else { self.stages() };
        if way == Way::Down {
            self.known(s, u)?;
        }
        if !self.there(s, way, u, of)? || self.place(s, way).offered.replace(s).is_some() {
            return Err(format!("{way:?} {u} is sent and not there"));
        }
        Ok(())
    }

    /// The receiver has taken what `s` sent.
    pub fn taken(&mut self, s: usize, way: Way) {
        self.place(s, way).offered = None;
    }

    /// Whether something that `s` sent is not taken yet.
    pub fn sending(&mut self, s: usize) -> bool {
        [Way::Up, Way::Down].into_iter().any(|way| self.place(s, way).offered == Some(s))
    }

    pub fn arrive(&mut self, s: usize, way: Way, u: u64) -> Checked {
        let of = if way == Way::Up { s } else { self.stages() };
        let place = self.place(s, way);
        if place.posted.take() != Some(u) {
            return Err(format!("{way:?} {u} arrives where nothing was posted"));
        }
        place.content = Some((u, of));
        Ok(())
    }

    /// Whether all that was sent or posted is done.
    pub fn ended(&self) -> bool {
        self.up.iter().chain(&self.down).all(|place| place.posted.is_none() && place.offered.is_none())
    }
}
