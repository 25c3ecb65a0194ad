//! A disk of its own for the servers of a cell: an ext4 file system on a loop device, whose power can be cut.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use lockkeeper_core::faults::FaultKind;

use crate::servers::{SERVERS_DIR, TempDir};

const SIZE: u64 = 160 << 20;

/// A mounted disk. Dropping it unmounts it.
#[derive(Debug)]
pub(super) struct LoopDisk {
    dir: TempDir,
    at: PathBuf,
    /// How often the power was cut.
    cuts: Cell<u32>,
}

impl LoopDisk {
    /// Whether the servers of a cell with this fault need one.
    pub fn wanted(fault: FaultKind) -> bool {
        matches!(fault, FaultKind::PowerCut | FaultKind::DiskFull)
    }

    /// Makes a disk and mounts it where the servers of this process have their directories: the process that started this one has set
    /// [`SERVERS_DIR`].
    pub fn mount() -> io::Result<LoopDisk> {
        let at = std::env::var_os(SERVERS_DIR).map(PathBuf::from);
        let at = at.ok_or_else(|| {
            io::Error::other(format!("{SERVERS_DIR} is not set: torture sets it for a cell"))
        })?;
        let dir = TempDir::outside("image");
        let disk = LoopDisk { dir, at, cuts: Cell::new(0) };
        File::create(disk.image())?.set_len(SIZE)?;
        run("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), &disk.image()])?;
        disk.attach()?;
        Ok(disk)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    fn image(&self) -> PathBuf {
        self.dir.join(&format!("image-{}", self.cuts.get()))
    }

    fn attach(&self) -> io::Result<()> {
        fs::create_dir_all(&self.at)?;
        run("mount", &["-o".as_ref(), "loop".as_ref(), &self.image(), &self.at])?;
        // PostgreSQL runs as another user.
        run("chmod", &["755".as_ref(), &self.at])
    }

    /// Writes everything to it.
    pub fn sync(&self) -> io::Result<()> {
        run("sync", &["-f".as_ref(), &self.at])
    }

    /// Cuts the power: what was not synced is lost, and nothing can be written until [`LoopDisk::power_on`]
    /// (`FS_IOC_SHUTDOWN` without flushing the journal).
    pub fn cut_power(&self) -> io::Result<()> {
        let script = "import fcntl,os,struct,sys\n\
            fcntl.ioctl(os.open(sys.argv[1],0),(2<<30)|(4<<16)|(ord('X')<<8)|125,struct.pack('I',2))";
        run("python3", &["-c".as_ref(), script.as_ref(), &self.at])
    }

    /// Mounts a copy of what the disk has. All processes that used it must have ended.
    ///
    /// A copy, because a process in a mount namespace of its own may keep the old file system alive, without power for ever.
    pub fn power_on(&self) -> io::Result<()> {
        self.detach()?;
        let old = self.image();
        self.cuts.set(self.cuts.get() + 1);
        run("cp", &["--sparse=always".as_ref(), &old, &self.image()])?;
        self.attach()
    }

    /// Fills it to the last byte.
    pub fn fill(&self) -> io::Result<()> {
        let mut file = File::create(self.at.join("ballast"))?;
        for size in [1 << 16, 4096, 1] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
        Ok(())
    }

    /// Undoes [`LoopDisk::fill`].
    pub fn free(&self) -> io::Result<()> {
        fs::remove_file(self.at.join("ballast"))
    }

    fn detach(&self) -> io::Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            match run("umount", &[&self.at]) {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > end => return Err(error),
                // A killed process may need a moment to close its files.
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            eprintln!("{} stays mounted: {error}", self.at.display());
        }
    }
}

/// Unmounts what a cell that was killed left.
pub(super) fn unmount_rest(at: &Path) {
    if fs::read_to_string("/proc/mounts").is_ok_and(|mounts| mounts.contains(&format!(" {} ", at.display())))
        && let Err(error) = run("umount", &["-l".as_ref(), at])
    {
        eprintln!("{} stays mounted: {error}", at.display());
    }
}

fn run(program: &str, args: &[&Path]) -> io::Result<()> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("{program}: {said}")))
}
