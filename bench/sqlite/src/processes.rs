//! Several processes on one file, each with one task and a name of its own.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lockkeeper_core::LockName;

use crate::{bare, median, ours, ratio};

const ROUND: Duration = Duration::from_secs(1);

pub fn run(dir: &Path, processes: usize, goal: f64, rounds: usize) {
    let (mut by_hand, mut fenced) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        by_hand.push(together(dir, "bare", processes));
        fenced.push(together(dir, "ours", processes));
    }
    let ratio = ratio(&fenced, &by_hand);
    println!(
        "acquire+release, {processes} processes: bare INSERT and DELETE {:.0}/s, fenced {:.0}/s: ratio {ratio:.2} (goal: at least {goal})",
        median(by_hand),
        median(fenced)
    );
}

/// Cycles per second of all processes together.
fn together(dir: &Path, which: &str, processes: usize) -> f64 {
    let path = dir.join(format!("{which}.db"));
    let start = |_| {
        let me = std::env::current_exe().expect("this program");
        let mut command = Command::new(me);
        command.arg("process").arg(which).arg(&path).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.spawn().expect("a process")
    };
    let mut all: Vec<Child> = (0..processes).map(start).collect();
    let mut heard: Vec<_> =
        all.iter_mut().map(|child| BufReader::new(child.stdout.take().expect("its output"))).collect();
    let line = |out: &mut BufReader<_>| {
        let mut line = String::new();
        out.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    };
    // All begin when all are there.
    heard.iter_mut().for_each(|out| assert_eq!(line(out), "ready"));
    for child in &mut all {
        writeln!(child.stdin.take().expect("its input"), "go").expect("it listens");
    }
    let rates = heard.iter_mut().map(|out| line(out).parse::<f64>().expect("a number"));
    let sum = rates.sum();
    all.iter_mut().for_each(|child| assert!(child.wait().expect("its end").success()));
    sum
}

/// One of the processes: says how many cycles it did in a second.
pub fn child(which: &str, path: &Path) {
    let pid = std::process::id();
    let begin = || {
        println!("ready");
        std::io::stdin().read_line(&mut String::new()).expect("a line");
        Instant::now()
    };
    let mut count = 0_u64;
    let began = match which {
        "bare" => {
            let sql = bare::open(path);
            let began = begin();
            while began.elapsed() < ROUND {
                count += 1;
                bare::cycle(&sql, &format!("process/{pid}"), count);
            }
            began
        }
        _ => {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let store = ours::open(path);
            let (name, holder) = (LockName::new(format!("process/{pid}")).expect("a name"), ours::holder());
            let began = begin();
            while began.elapsed() < ROUND {
                count += 1;
                runtime.block_on(ours::cycle(&store, &name, &holder));
            }
            began
        }
    };
    println!("{}", count as f64 / began.elapsed().as_secs_f64());
}
