//! Reading the lines: the names of the nodes in one request for each line, and of what is in them only what is needed.

use std::collections::HashSet;

use futures_util::future::join_all;
use lockkeeper_core::{Ask, LockName, Mode};

use crate::fault::Failure;
use crate::line::{Line, One, Read};
use crate::link::Session;
use crate::store::Shared;

/// How much of a line is looked at to say who is in the way.
const FEW: usize = 3;

impl Shared {
    /// The line of a name: who is there, and nothing more. An empty one if there is no such node.
    pub async fn list(&self, session: &Session, name: &LockName) -> Result<Line, Failure> {
        let dir = self.layout.line(name);
        let (children, changed) = match Failure::gone(session.children(&dir).await)? {
            Some((children, stat)) => (children, stat.pzxid),
            None => (Vec::new(), 0),
        };
        Ok(Line::read(name, &dir, children, changed))
    }

    pub async fn list_all(&self, session: &Session, names: &[LockName]) -> Result<Vec<Line>, Failure> {
        join_all(names.iter().map(|name| self.list(session, name))).await.into_iter().collect()
    }

    /// Reads what is in some of the nodes. Those that are gone by now are taken out of the line.
    pub async fn read(
        &self,
        session: &Session,
        line: &mut Line,
        wanted: impl Fn(usize, &One) -> bool,
    ) -> Result<(), Failure> {
        let reads = line.all.iter().enumerate().filter(|(i, one)| one.read.is_none() && wanted(*i, one));
        let reads = reads.map(|(i, one)| async move { (i, Failure::gone(session.get(&one.path).await)) });
        let mut gone = HashSet::new();
        for (i, found) in join_all(reads).await {
            match found? {
                Some((data, stat)) => {
                    let entry = line.all[i].mark.and_then(|_| serde_json::from_slice(&data).ok());
                    line.all[i].read = Some(Read { entry, stat });
                }
                None => _ = gone.insert(line.all[i].path.clone()),
            }
        }
        line.all.retain(|one| !gone.contains(&one.path));
        Ok(())
    }

    /// Reads what is needed to judge an ask. Somebody who wants it alone and has no owner needs to know only who stands in
    /// front; but holds that passed the line may be anywhere.
    pub async fn read_for(
        &self,
        session: &Session,
        ask: &Ask,
        line: &mut Line,
        own: &str,
    ) -> Result<(), Failure> {
        let place = line.place(own).unwrap_or(line.all.len());
        let simple = ask.mode == Mode::Exclusive && ask.owner.is_none();
        let wanted = |i: usize, one: &One| match simple {
            true => place == 0 && one.owned,
            false => i < place || (one.owned && i != place),
        };
        self.read(session, line, wanted).await?;
        self.read_backs(session, line).await
    }

    /// Reads who is in the way, to tell.
    pub async fn read_few(&self, session: &Session, line: &mut Line) -> Result<(), Failure> {
        self.read(session, line, |i, _| i < FEW).await
    }
}
