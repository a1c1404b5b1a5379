//! Shows runs: a live page in the browser, a view in the terminal, a report in one file, and a
//! registry that can be asked with SQL.
//!
//! Everything is read from the folders of runs. So runs of any age can be shown, and watching a run
//! does not disturb its training. The only files that are written are the registry and reports.
//!
//! | module | does |
//! |---|---|
//! | [`inside`] | opens files of the runs folder, and no others |
//! | [`run`], [`store`] | the files of a run, in short and as they grow |
//! | [`flatten`], [`table`] | JSON lines as columns |
//! | [`steps`], [`pyramid`] | any part of a curve, without a lost value |
//! | [`alerts`], [`timeline`] | facts to know at once; a step over all ranks |
//! | [`page`], [`server`], [`report`] | the page, over HTTP or in one file |
//! | [`top`] | a run in the terminal |
//! | [`registry`], [`select`] | all runs as tables; a choice of them |

pub mod alerts;
pub mod flatten;
pub mod inside;
pub mod page;
pub mod pyramid;
pub mod registry;
pub mod report;
pub mod run;
pub mod select;
pub mod server;
pub mod steps;
pub mod store;
pub mod table;
pub mod timeline;
pub mod top;
