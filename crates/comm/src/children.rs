//! Child processes that do not outlive their parent.

use rustix::process::{getppid, set_parent_process_death_signal};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

pub use rustix::process::Signal;

/// Lets the process that `command` starts get `signal` when this process ends, however it ends.
///
/// The kernel sends it when the thread that starts the process ends, so that has to be a thread
/// that stays, such as the main thread.
pub fn end_with_parent(command: &mut Command, signal: Signal) {
    let parent = std::process::id();
    let arrange = move || -> io::Result<()> {
        set_parent_process_death_signal(Some(signal))?;
        // The parent may have ended before that: then the signal would never come.
        let is_there = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent);
        if is_there { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: between fork and exec only two system calls are made, and nothing is allocated: the
    // error is a plain code.
    unsafe { command.pre_exec(arrange) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::Stdio;
    use std::thread;

    /// The thread that starts the child stands for the parent: the kernel goes by it.
    #[test]
    fn a_child_ends_with_its_parent() {
        let start = || {
            let mut command = Command::new("sleep");
            command.arg("600").stdout(Stdio::piped());
            end_with_parent(&mut command, Signal::KILL);
            command.spawn().unwrap()
        };
        let mut child = thread::spawn(start).join().unwrap();
        // Its end closes the pipe.
        let mut output = child.stdout.take().unwrap();
        assert_eq!(output.read(&mut [0]).unwrap(), 0);
        assert!(!child.wait().unwrap().success());
    }
}
