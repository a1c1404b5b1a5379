//! `cargo xtask objects`: reads text of every format from a real S3 server, moto's.
//!
//! The files are those that the tests of formats use. They are uploaded by boto3, found by pattern,
//! by prefix and by name, and tokenized; the token files must be those of the same files on disk.
//! It needs a Python with moto, its server and boto3: `pip install 'moto[server]'`.

use crate::slurm::program;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `cargo xtask objects`.
#[derive(clap::Args)]
pub struct Options {
    /// The program. Default: the debug build, made first.
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
    /// A Python that has moto, its server and boto3.
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
}

/// Uploads every file of a folder to a new bucket: endpoint, folder.
const UPLOAD: &str = "\
import boto3, os, sys
s3 = boto3.client('s3', endpoint_url=sys.argv[1], region_name='us-east-1')
s3.create_bucket(Bucket='corpus')
for name in sorted(os.listdir(sys.argv[2])):
    s3.upload_file(os.path.join(sys.argv[2], name), 'corpus', 'text/' + name)
";

/// Time for the server to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// The golden files that are uploaded.
const FILES: [&str; 4] = ["packed.tar.gz", "packed.tar.zst", "snappy.parquet", "zstd.parquet"];

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs all of it; false if the token files differ.
pub fn run(root: &Path, options: &Options) -> Result<bool> {
    let program = program(root, options.program.as_deref())?;
    let folder = crate::bench::target_folder(root).join("objects");
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    let text = folder.join("text");
    fs::create_dir_all(&text).with_context(|| format!("cannot create {}", text.display()))?;
    for name in FILES {
        fs::copy(root.join("crates/data/tests/golden/sources").join(name), text.join(name))?;
    }
    // Several blocks of 8 MiB.
    let line = |i: u64| format!("{{\"text\":\"{:016x} is number {i}\"}}\n", i.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    fs::write(text.join("large.jsonl"), (0..400_000).map(line).collect::<String>())?;

    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let mut server = Command::new(&options.python);
    server.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
    let started = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context("cannot start moto's server")?;
    let mut server = Server(started);
    let began = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if let Some(status) = server.0.try_wait()? {
            bail!("moto's server ended with {status}: does {} have moto[server]?", options.python.display());
        }
        ensure!(began.elapsed() < PATIENCE, "moto's server does not listen");
        std::thread::sleep(Duration::from_millis(100));
    }
    let with_keys = |command: &mut Command| {
        let keys = [("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s"), ("AWS_REGION", "us-east-1")];
        command.envs(keys).env("AWS_ENDPOINT_URL", &endpoint).env("AWS_ALLOW_HTTP", "true").current_dir(&folder);
    };
    let mut upload = Command::new(&options.python);
    with_keys(upload.args(["-c", UPLOAD, &endpoint]).arg(&text));
    ensure!(upload.status().context("cannot run Python")?.success(), "the files cannot be uploaded");

    let prepare = |out: &str, sources: &[&str]| -> Result<Vec<Vec<u8>>> {
        let mut command = Command::new(&program);
        with_keys(command.args(["data", "prepare", "--tokenizer", "bytes", "--out", out]).args(sources));
        ensure!(command.status().context("cannot run the program")?.success(), "data prepare failed");
        let parts = ["train.bin", "train.idx", "validation.bin", "validation.idx"];
        parts.iter().map(|part| Ok(fs::read(folder.join(format!("{out}.{part}")))?)).collect()
    };
    let of_files = prepare("files", &["text"])?;
    let names = "s3://corpus/text/{large.jsonl,packed.tar.gz,packed.tar.zst,snappy.parquet,zstd.parquet}";
    let mut is_equal = true;
    for (out, source) in [("folder", "s3://corpus/text/"), ("pattern", "s3://corpus/t*/*"), ("names", names)] {
        let equal = prepare(out, &[source])? == of_files;
        println!("{source}: token files are {}", if equal { "equal" } else { "DIFFERENT" });
        is_equal &= equal;
    }
    Ok(is_equal)
}
