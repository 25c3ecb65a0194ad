use std::fs::{self, File};
use std::io;

use lockkeeper_core::{Error, Fence, Result};

use super::place::Place;
use super::same;
use super::temp::Temp;

/// The mark, locked: the file with the number in it is also what writers wait for.
pub(super) struct Mark {
    /// Closing them ends the turn: the mark that was found, and the one that was put in its place.
    _turn: File,
    _raised: Option<Temp>,
    seen: Option<Fence>,
}

impl Mark {
    /// One's turn to write. The mark is made, empty, if there is none.
    pub fn exclusive(place: &Place) -> Result<Mark> {
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&place.mark);
        Mark::locked(place, open, File::lock)
            .map_err(|e| place.fault("its mark cannot be locked", &e))?
            .read(place)
    }

    /// One's turn to read. `None`: there is no mark.
    pub fn shared(place: &Place) -> Result<Option<Mark>> {
        match Mark::locked(place, || File::open(&place.mark), File::lock_shared) {
            Ok(turn) => turn.read(place).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(place.fault("its mark cannot be locked", &e)),
        }
    }

    /// Whoever was before us has put a new mark in the place of the one that we waited for: then we wait for that one.
    fn locked(
        place: &Place,
        open: impl Fn() -> io::Result<File>,
        lock: impl Fn(&File) -> io::Result<()>,
    ) -> io::Result<Turn> {
        loop {
            let file = open()?;
            lock(&file)?;
            match same(&file, &place.mark) {
                Ok(true) => return Ok(Turn(file)),
                Ok(false) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
    }

    pub fn seen(&self) -> Option<Fence> {
        self.seen
    }

    /// Puts a higher one in its place, which is locked before anybody can see it and stays so: from now on others wait for that
    /// one, and what was found is nobody's any more.
    pub fn raise(&mut self, place: &Place, fence: Fence) -> io::Result<()> {
        let mut raised = Temp::new(place)?;
        raised.fill(&mut format!("{fence}\n").as_bytes())?;
        raised.replace(&place.mark)?;
        self._raised = Some(raised);
        place.sync()
    }
}

struct Turn(File);

impl Turn {
    fn read(self, place: &Place) -> Result<Mark> {
        let seen = peek(place)?;
        Ok(Mark { _turn: self.0, _raised: None, seen })
    }
}

/// The mark, without waiting for a turn. A damaged one is never taken for none.
pub(super) fn peek(place: &Place) -> Result<Option<Fence>> {
    let text = match fs::read(&place.mark) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(place.fault("its mark cannot be read", &e)),
    };
    // Just made, by somebody who has not written yet.
    if text.is_empty() {
        return Ok(None);
    }
    let number = std::str::from_utf8(&text).ok().and_then(|text| text.strip_suffix('\n')?.parse().ok());
    number.and_then(|number| Fence::new(number).ok()).map(Some).ok_or_else(|| {
        let mark = place.mark.display();
        Error::invalid(format!(
            "{mark} is damaged: it is to hold one number, the highest fence that was seen; write it there, or delete the file \
             if no writer of before is left"
        ))
    })
}
