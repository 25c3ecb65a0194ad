//! The servers and tools that scenarios need, and how to install them.

use std::path::Path;

/// Something that a scenario starts and that may not be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A Redis server.
    Redis,
    /// A ZooKeeper server.
    ZooKeeper,
    /// A C compiler, for the library that shifts the clock of a server.
    Compiler,
}

impl Need {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Need::Redis => "Redis",
            Need::ZooKeeper => "ZooKeeper",
            Need::Compiler => "a C compiler",
        }
    }

    /// The packages of Debian and Ubuntu.
    pub fn packages(self) -> &'static str {
        match self {
            Need::Redis => "redis-server",
            Need::ZooKeeper => "zookeeper default-jre-headless",
            Need::Compiler => "gcc",
        }
    }

    /// Whether it is installed.
    pub fn is_installed(self) -> bool {
        match self {
            Need::Redis => has_program("redis-server"),
            Need::ZooKeeper => Path::new("/usr/share/java/zookeeper.jar").is_file() && has_program("java"),
            Need::Compiler => has_program("cc"),
        }
    }

    /// The command that installs the packages of all of these.
    pub fn install(needs: &[Need]) -> String {
        let packages: Vec<&str> = needs.iter().map(|need| need.packages()).collect();
        format!("apt-get install --no-install-recommends {}", packages.join(" "))
    }
}

/// Whether a program is on the path, or where Debian keeps programs for administrators.
pub fn has_program(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    usual.into_iter().any(|dir| dir.join(name).is_file())
}
