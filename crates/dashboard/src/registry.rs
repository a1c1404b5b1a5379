//! All runs of a folder in one SQLite file, `registry.sqlite`, which any program can query.
//!
//! The registry is derived from the folders of runs. Each query first brings it up to date, in one
//! transaction, so a process that is killed leaves the state before or after. A registry that is
//! missing, damaged or of another version is made again. Training runs do not write to it, so they
//! never wait for it.

use crate::inside::Inside;
use crate::run::{LISTED, Mark, State, Summary, TEXT_BYTES_MAX, files, folders};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior, params, params_from_iter};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The registry's file in the runs folder.
pub const FILE: &str = "registry.sqlite";

/// The version of the tables; a registry of another version is made anew.
const VERSION: i64 = 1;
/// Time to wait for other processes that write.
const BUSY: Duration = Duration::from_secs(60);
/// Attempts to make a damaged registry anew. Another process may do the same.
const ATTEMPTS: usize = 5;

/// The numbers in [`LISTED`] are columns of `runs`.
const SCHEMA: &str = "
CREATE TABLE runs (
    name TEXT PRIMARY KEY, state TEXT NOT NULL, created_s REAL, updated_s REAL, step INTEGER, steps INTEGER,
    loss REAL, validation_loss REAL, validation_loss_min REAL, lr REAL, grad_norm REAL, tokens REAL, epoch REAL,
    tps REAL, tflops REAL, mfu REAL, step_s REAL, predicted_step_s REAL, mem_peak_bytes REAL,
    predicted_mem_peak_bytes REAL, config_hash TEXT, program_hash TEXT, mark TEXT NOT NULL
);
CREATE TABLE config (run TEXT NOT NULL, key TEXT NOT NULL, value, PRIMARY KEY (run, key)) WITHOUT ROWID;
CREATE TABLE metrics (run TEXT NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (run, name)) WITHOUT ROWID;
CREATE TABLE environment (run TEXT NOT NULL, key TEXT NOT NULL, value, PRIMARY KEY (run, key)) WITHOUT ROWID;
";

/// The tables beside `runs`, each with the column that names its values.
const PARTS: [(&str, &str); 3] = [("config", "key"), ("metrics", "name"), ("environment", "key")];

/// An error of the registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The runs folder cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// SQLite refuses.
    #[error("the registry {path}: {source}")]
    Sqlite {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: rusqlite::Error,
    },
    /// The text is not one reading query.
    #[error("{0}")]
    Query(String),
}

/// The registry of a runs folder, up to date.
pub struct Registry {
    connection: Connection,
    notices: Vec<String>,
}

/// The answer to a query.
#[derive(Debug, PartialEq)]
pub struct Rows {
    /// The names of the columns.
    pub columns: Vec<String>,
    /// The values.
    pub rows: Vec<Vec<Value>>,
}

impl Registry {
    /// Opens the registry of the runs folder `root` and brings it up to date. In a folder that
    /// cannot be written it is kept in memory.
    ///
    /// # Errors
    ///
    /// The folder cannot be read, or SQLite refuses.
    pub fn open(root: &Path) -> Result<Registry, RegistryError> {
        let io_error = |source| RegistryError::Io { path: root.to_owned(), source };
        let inside = Inside::new(root).map_err(io_error)?;
        let path = inside.root().join(FILE);
        let sqlite_error = |source| RegistryError::Sqlite { path: path.clone(), source };
        let mut notices = Vec::new();
        for _ in 0..ATTEMPTS {
            let opened = open(&path).and_then(|mut connection| {
                make_tables(&mut connection)?;
                Ok(connection)
            });
            let result = opened
                .map_err(sqlite_error)
                .and_then(|mut connection| update(&mut connection, &inside).map(|()| connection));
            match result {
                Ok(connection) => return Ok(Registry { connection, notices }),
                Err(RegistryError::Sqlite { source, .. }) if is_damaged(&source) => {
                    let aside = path.with_extension("sqlite.damaged");
                    match std::fs::rename(&path, &aside) {
                        Ok(()) => notices.push(format!(
                            "{} was damaged ({source}) and is made anew from the folders of the runs; the damaged one is {}",
                            path.display(),
                            aside.display()
                        )),
                        // Another process was faster.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        Err(source) => return Err(RegistryError::Io { path, source }),
                    }
                }
                Err(RegistryError::Sqlite { source, .. }) if is_unwritable(&source) => {
                    notices.push(format!("{} cannot be written ({source}): it is kept in memory", path.display()));
                    let mut connection = Connection::open_in_memory().map_err(sqlite_error)?;
                    make_tables(&mut connection).map_err(sqlite_error)?;
                    update(&mut connection, &inside)?;
                    return Ok(Registry { connection, notices });
                }
                Err(error) => return Err(error),
            }
        }
        Err(RegistryError::Query(format!("{} is damaged again and again: remove it", path.display())))
    }

    /// Sentences for the user about a registry that had to be made anew or cannot be written.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The answer to a query in SQL that reads.
    ///
    /// # Errors
    ///
    /// SQLite does not understand it, or it would write.
    pub fn query(&self, sql: &str) -> Result<Rows, RegistryError> {
        self.rows(sql, &[])
    }

    fn rows(&self, sql: &str, parameters: &[&&str]) -> Result<Rows, RegistryError> {
        let error = |source: rusqlite::Error| {
            RegistryError::Query(format!("{source} (tables: runs, config, metrics, environment)"))
        };
        self.connection.pragma_update(None, "query_only", true).map_err(error)?;
        let mut statement = self.connection.prepare(sql).map_err(error)?;
        if !statement.readonly() {
            return Err(RegistryError::Query("the registry can only be read: use a SELECT".to_owned()));
        }
        let columns: Vec<String> = statement.column_names().into_iter().map(str::to_owned).collect();
        let mut found = statement.query(params_from_iter(parameters)).map_err(error)?;
        let mut rows = Vec::new();
        while let Some(row) = found.next().map_err(error)? {
            let values = (0..columns.len()).map(|index| row.get_ref(index).map(json_of));
            rows.push(values.collect::<Result<_, _>>().map_err(error)?);
        }
        Ok(Rows { columns, rows })
    }

    /// All runs, each as one object: the columns of `runs`, and below `config`, `metrics` and
    /// `environment` its rows of those tables. With `names` those parts have only
    /// the rows that one of them can mean: its own, and those of keys such as `model.dim` that end
    /// with it. Reading every metric of many runs takes seconds.
    ///
    /// # Errors
    ///
    /// SQLite refuses.
    pub fn runs(&self, names: Option<&[&str]>) -> Result<Vec<Map<String, Value>>, RegistryError> {
        let table = self.query("SELECT * FROM runs ORDER BY name")?;
        let mut runs: BTreeMap<String, Map<String, Value>> = BTreeMap::new();
        for row in table.rows {
            let mut run: Map<String, Value> = table.columns.iter().cloned().zip(row).collect();
            run.remove("mark");
            let name = run["name"].as_str().unwrap_or_default().to_owned();
            runs.insert(name, run);
        }
        for (part, key) in PARTS {
            runs.values_mut().for_each(|run| drop(run.insert(part.to_owned(), json!({}))));
            let select = format!("SELECT run, {key}, value FROM {part}");
            // The name itself, or the end of a path such as `model.dim`.
            let named = format!("{select} WHERE {key} = ?1 OR substr({key}, -length(?1) - 1) = '.' || ?1");
            let found = match names {
                None => vec![self.rows(&select, &[])?],
                Some(names) => names.iter().map(|name| self.rows(&named, &[name])).collect::<Result<_, _>>()?,
            };
            for row in found.into_iter().flat_map(|found| found.rows) {
                let Ok([Value::String(run), Value::String(key), value]) = <[Value; 3]>::try_from(row) else { continue };
                if let Some(Value::Object(values)) = runs.get_mut(&run).and_then(|run| run.get_mut(part)) {
                    values.insert(key, value);
                }
            }
        }
        Ok(runs.into_values().collect())
    }
}

fn open(path: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY)?;
    Ok(connection)
}

fn make_tables(connection: &mut Connection) -> rusqlite::Result<()> {
    let version = |connection: &Connection| -> rusqlite::Result<i64> {
        connection.pragma_query_value(None, "user_version", |row| row.get(0))
    };
    if version(connection)? == VERSION {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have made them meanwhile.
    if version(&transaction)? != VERSION {
        for table in PARTS.map(|(part, _)| part).into_iter().chain(["runs"]) {
            transaction.execute(&format!("DROP TABLE IF EXISTS {table}"), [])?;
        }
        transaction.execute_batch(SCHEMA)?;
        transaction.pragma_update(None, "user_version", VERSION)?;
    }
    transaction.commit()
}

/// Brings the tables up to date with the folders.
fn update(connection: &mut Connection, inside: &Inside) -> Result<(), RegistryError> {
    let path = inside.root().to_owned();
    let sqlite_error = |source| RegistryError::Sqlite { path: path.join(FILE), source };
    let io_error = |source| RegistryError::Io { path: path.clone(), source };
    let found = folders(inside).map_err(io_error)?;
    let known = known(connection).map_err(sqlite_error)?;
    let names: BTreeSet<&String> = found.iter().map(|(name, _)| name).collect();
    let gone: Vec<&String> = known.keys().filter(|name| !names.contains(name)).collect();
    let mut changed = Vec::new();
    for (name, folder) in &found {
        let mark = format!("{:?}", Mark::of(folder));
        let is_over = |(known, state): &(String, String)| *known == mark && state != State::Running.name();
        if known.get(name).is_some_and(is_over) {
            continue;
        }
        match Summary::read(inside, name, folder) {
            Ok(summary) => changed.push((summary, environment(inside, folder), mark)),
            // The folder was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(RegistryError::Io { path: folder.clone(), source }),
        }
    }
    if changed.is_empty() && gone.is_empty() {
        return Ok(());
    }
    let write = |connection: &mut Connection| {
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for name in gone {
            remove(&transaction, name)?;
        }
        for (summary, environment, mark) in &changed {
            remove(&transaction, &summary.name)?;
            insert(&transaction, summary, environment, mark)?;
        }
        transaction.commit()
    };
    write(connection).map_err(sqlite_error)
}

/// The mark and the state of each run in the registry.
fn known(connection: &Connection) -> rusqlite::Result<BTreeMap<String, (String, String)>> {
    let mut statement = connection.prepare("SELECT name, mark, state FROM runs")?;
    let rows = statement.query_map([], |row| Ok((row.get(0)?, (row.get(1)?, row.get(2)?))))?;
    rows.collect()
}

fn remove(transaction: &Transaction<'_>, name: &str) -> rusqlite::Result<()> {
    transaction.execute("DELETE FROM runs WHERE name = ?1", [name])?;
    for (table, _) in PARTS {
        transaction.prepare_cached(&format!("DELETE FROM {table} WHERE run = ?1"))?.execute([name])?;
    }
    Ok(())
}

fn insert(
    transaction: &Transaction<'_>,
    run: &Summary,
    environment: &BTreeMap<String, Value>,
    mark: &str,
) -> rusqlite::Result<()> {
    transaction.execute(
        "INSERT INTO runs (name, state, created_s, updated_s, step, steps, validation_loss, validation_loss_min, step_s, \
         config_hash, program_hash, mark) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        params![
            run.name,
            run.state.name(),
            run.created_s,
            run.updated_s,
            run.step as i64,
            run.steps.map(|steps| steps as i64),
            run.validation_loss,
            run.validation_loss_min,
            run.step_s.or(run.last.get("step_s").copied()),
            run.config_hash,
            run.program_hash,
            mark
        ],
    )?;
    for name in LISTED {
        let value = run.last.get(name).copied().filter(|value| value.is_finite());
        transaction
            .prepare_cached(&format!("UPDATE runs SET {name} = ?1 WHERE name = ?2"))?
            .execute(params![value, run.name])?;
    }
    let add = |table: &str, key: &str, name: &str, value: &Value| {
        let sql = format!("INSERT OR REPLACE INTO {table} (run, {key}, value) VALUES (?1, ?2, ?3)");
        transaction.prepare_cached(&sql)?.execute(params![run.name, name, sql_of(value)]).map(drop)
    };
    run.config.iter().try_for_each(|(key, value)| add("config", "key", key, value))?;
    run.last.iter().try_for_each(|(name, value)| add("metrics", "name", name, &json!(value)))?;
    environment.iter().try_for_each(|(key, value)| add("environment", "key", key, value))
}

/// The facts in `environment.json`: version, host, cores and others. Runs of other programs have
/// none.
fn environment(inside: &Inside, folder: &Path) -> BTreeMap<String, Value> {
    let text = inside.read(&folder.join(files::ENVIRONMENT), TEXT_BYTES_MAX).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or_default()
}

fn sql_of(value: &Value) -> rusqlite::types::Value {
    use rusqlite::types::Value as Sql;
    match value {
        Value::Null => Sql::Null,
        Value::Bool(value) => Sql::Integer(i64::from(*value)),
        Value::Number(number) => {
            number.as_i64().map_or_else(|| number.as_f64().map_or(Sql::Null, Sql::Real), Sql::Integer)
        }
        Value::String(text) => Sql::Text(text.clone()),
        other => Sql::Text(other.to_string()),
    }
}

fn json_of(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => json!(number),
        ValueRef::Real(number) => json!(number),
        ValueRef::Text(text) => String::from_utf8_lossy(text).into(),
        ValueRef::Blob(bytes) => format!("{} bytes", bytes.len()).into(),
    }
}

fn code(error: &rusqlite::Error) -> Option<ErrorCode> {
    match error {
        rusqlite::Error::SqliteFailure(failure, _) => Some(failure.code),
        rusqlite::Error::SqlInputError { error, .. } => Some(error.code),
        _ => None,
    }
}

fn is_damaged(error: &rusqlite::Error) -> bool {
    let is_of_another_form = matches!(error, rusqlite::Error::InvalidColumnType(..));
    is_of_another_form || matches!(code(error), Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt))
        // A table that is not what this version makes.
        || code(error) == Some(ErrorCode::Unknown)
}

fn is_unwritable(error: &rusqlite::Error) -> bool {
    matches!(code(error), Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_run(root: &Path, name: &str, dim: u32, tps: f64) {
        let folder = root.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(
            folder.join("config.toml"),
            format!("[model]\n# dim = {dim}  # preset\n[training]\nsteps = 2\n"),
        )
        .unwrap();
        let record = format!("{{\"step\":2,\"loss\":2.5,\"tps\":{tps},\"mem_peak\":{{\"grads\":7}}}}\n");
        std::fs::write(folder.join("metrics.jsonl"), record).unwrap();
        std::fs::write(folder.join("environment.json"), "{\"version\":\"0.1.0\"}").unwrap();
    }

    fn names(registry: &Registry) -> Vec<String> {
        registry.runs(None).unwrap().iter().map(|run| run["name"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn the_registry_follows_the_folders() {
        let root = tempfile::tempdir().unwrap();
        make_run(root.path(), "a", 64, 10.0);
        make_run(root.path(), "b", 768, 30.0);
        let registry = Registry::open(root.path()).unwrap();
        let run = &registry.runs(None).unwrap()[1];
        assert_eq!((&run["name"], &run["tps"], &run["config"]["model.dim"]), (&json!("b"), &json!(30.0), &json!(768)));
        assert_eq!((&run["metrics"]["mem_peak.grads"], &run["environment"]["version"]), (&json!(7.0), &json!("0.1.0")));
        let run = &registry.runs(Some(&["dim", "grads"])).unwrap()[1];
        assert_eq!((&run["tps"], &run["config"]), (&json!(30.0), &json!({"model.dim": 768})));
        assert_eq!((&run["metrics"], &run["environment"]), (&json!({"mem_peak.grads": 7.0}), &json!({})));
        let sql =
            "SELECT r.name FROM runs r JOIN config c ON c.run = r.name WHERE c.key = 'model.dim' AND c.value = 64";
        assert_eq!(registry.query(sql).unwrap().rows, [[json!("a")]]);
        drop(registry);
        std::fs::remove_dir_all(root.path().join("a")).unwrap();
        make_run(root.path(), "b", 768, 31.25);
        make_run(root.path(), "c", 768, 5.0);
        let registry = Registry::open(root.path()).unwrap();
        assert_eq!(names(&registry), ["b", "c"]);
        assert_eq!(registry.query("SELECT tps FROM runs WHERE name = 'b'").unwrap().rows, [[json!(31.25)]]);
        assert_eq!(registry.query("SELECT count(*) FROM config WHERE run = 'a'").unwrap().rows, [[json!(0)]]);
    }

    #[test]
    fn a_registry_that_is_missing_or_damaged_is_made_anew() {
        let root = tempfile::tempdir().unwrap();
        make_run(root.path(), "a", 64, 10.0);
        let path = root.path().join(FILE);
        drop(Registry::open(root.path()).unwrap());
        let whole = std::fs::read(&path).unwrap();
        let mut torn = whole.clone();
        torn[4096..].fill(0x5a);
        for damage in [&b"not a database, but some text that is long enough to be read as a header"[..], &torn, &[]] {
            std::fs::write(&path, damage).unwrap();
            let registry = Registry::open(root.path()).unwrap();
            assert_eq!(names(&registry), ["a"]);
            assert_eq!(registry.notices().len(), usize::from(!damage.is_empty()), "{:?}", registry.notices());
        }
        let other = Connection::open(&path).unwrap();
        other.execute_batch("DROP TABLE runs; CREATE TABLE runs (x);").unwrap();
        drop(other);
        assert_eq!(names(&Registry::open(root.path()).unwrap()), ["a"]);
    }

    #[test]
    fn queries_only_read() {
        let root = tempfile::tempdir().unwrap();
        make_run(root.path(), "a", 64, 10.0);
        let registry = Registry::open(root.path()).unwrap();
        for sql in ["DELETE FROM runs", "SELEC", "DROP TABLE runs", "SELECT x FROM runs", "", "PRAGMA query_only = 0"] {
            let answer = registry.query(sql);
            assert!(answer.is_err() || sql.starts_with("PRAGMA"), "{sql}: {answer:?}");
        }
        assert_eq!(names(&registry), ["a"]);
    }
}
