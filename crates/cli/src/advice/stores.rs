//! The store: what runs already, in the order in which it keeps the promises that the purpose needs.

use lockkeeper::Purpose;

use super::{HostCount, RunningSystem, Situation};

/// Where a mechanism keeps its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateHome {
    /// In the database that has the data: no store is needed.
    OwnDatabase,
    /// In a store with locks and records.
    Store,
}

/// A store, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreAdvice {
    /// The form of its URL. `None`: no store is needed.
    pub url: Option<&'static str>,
    pub why: &'static str,
}

/// One row: what runs, the URL, and the reasons for each purpose; `None`: it is not for that purpose.
struct StoreRow {
    system: RunningSystem,
    url: &'static str,
    correctness: Option<&'static str>,
    efficiency: &'static str,
}

/// The stores for several hosts, those for correctness in the order of preference.
const STORES: [StoreRow; 5] = [
    StoreRow {
        system: RunningSystem::Postgres,
        url: "postgres://HOST/DATABASE",
        correctness: Some(
            "you run it, it keeps grants over a crash, and data in the same database can check the fence",
        ),
        efficiency: "you run it",
    },
    StoreRow {
        system: RunningSystem::Etcd,
        url: "etcd://HOST,HOST,HOST",
        correctness: Some("you run it, and a grant survives the death of any server"),
        efficiency: "you run it",
    },
    StoreRow {
        system: RunningSystem::Zookeeper,
        url: "zk://HOST,HOST,HOST",
        correctness: Some("you run it, and a grant survives the death of any server (3.9.4 or later)"),
        efficiency: "you run it",
    },
    StoreRow {
        system: RunningSystem::Aws,
        url: "dynamodb://REGION/TABLE",
        correctness: Some(
            "it needs no server, and a grant survives; waiters poll, so a free lock is granted later",
        ),
        efficiency: "it needs no server; waiters poll",
    },
    StoreRow {
        system: RunningSystem::Redis,
        url: "redis://HOST",
        correctness: None,
        efficiency: "you run it, and it is the fastest of the stores for several hosts",
    },
];

const ONE_HOST: StoreAdvice = StoreAdvice {
    url: Some("sqlite:PATH"),
    why: "one host needs no server, and the lock of a dead process is free at once",
};
const OWN: StoreAdvice = StoreAdvice {
    url: None,
    why: "the database that has the data decides, in the statement that changes it",
};
const INSTALL: StoreAdvice = StoreAdvice {
    url: Some("postgres://HOST/DATABASE"),
    why: "you run no store for several hosts yet: one PostgreSQL is the least work",
};
const REDIS_IS_NOT: StoreAdvice = StoreAdvice {
    url: Some("postgres://HOST/DATABASE"),
    why: "Redis can forget a grant in a crash or a fail-over (only one server with `appendfsync always` and no replica does not): for \
          correctness one PostgreSQL is the least work",
};

/// The store for a mechanism that keeps its state at `home`.
pub fn choose(home: StateHome, situation: &Situation) -> StoreAdvice {
    if home == StateHome::OwnDatabase {
        return OWN;
    }
    if situation.hosts == HostCount::One {
        return ONE_HOST;
    }
    let runs = |row: &&StoreRow| situation.running.contains(&row.system);
    match situation.purpose {
        Purpose::Efficiency => {
            // The fastest first.
            let row = STORES.iter().rev().find(|row| row.system == RunningSystem::Redis && runs(row));
            let row = row.or_else(|| STORES.iter().find(runs));
            row.map_or(INSTALL, |row| StoreAdvice { url: Some(row.url), why: row.efficiency })
        }
        Purpose::Correctness => {
            let good = STORES.iter().filter(runs).find_map(|row| Some((row.url, row.correctness?)));
            match good {
                Some((url, why)) => StoreAdvice { url: Some(url), why },
                None if situation.running.contains(&RunningSystem::Redis) => REDIS_IS_NOT,
                None => INSTALL,
            }
        }
    }
}
