//! Times as people write them: RFC 3339, `2026-11-27 08:00`, `Fri 08:00`, `+6h`.
//!
//! Inside the queue a time is an `i64`: seconds since 1970-01-01 00:00 UTC. A text without an
//! offset from UTC is local time. The offset of a zone changes with the seasons, so it is a
//! function of time. The calendar arithmetic is Howard Hinnant's `days_from_civil`
//! ("chrono-Compatible Low-Level Date Algorithms").

use crate::QueueError;

/// The seconds that local time is ahead of UTC, at a time.
pub type Offset<'a> = &'a dyn Fn(i64) -> i64;

/// The days of the week, from that of 1970-01-01.
const WEEKDAYS: [&str; 7] = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"];
/// Seconds of a day.
pub const DAY_S: i64 = 86_400;
/// Seconds of a week.
pub const WEEK_S: i64 = 7 * DAY_S;
/// The forms of a deadline, for messages.
const FORMS: &str = "`Fri 08:00`, `08:00`, `2026-11-27 08:00`, `2026-11-27T08:00:00Z`, or `+6h` (m, h, d)";

/// Days since 1970-01-01 of a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date of a day.
fn date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + i64::from(month <= 2), month, day)
}

/// The time that a clock on the wall shows as `local`.
fn of_local(local: i64, offset: Offset<'_>) -> i64 {
    let guess = local - offset(local);
    local - offset(guess)
}

/// Digits of a number of exactly `width` of them.
fn number(text: &str, width: usize) -> Option<i64> {
    (text.len() == width && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
}

/// `08:00` or `08:00:30`, in seconds of the day; a fraction of a second is dropped.
fn clock(text: &str) -> Option<i64> {
    let whole = text.split_once('.').map_or(text, |(whole, _)| whole);
    let mut parts = whole.split(':');
    let hour = parts.next()?;
    let hour = if hour.len() == 1 { number(hour, 1)? } else { number(hour, 2)? };
    let minute = number(parts.next()?, 2)?;
    let second = parts.next().map_or(Some(0), |second| number(second, 2))?;
    let is_valid = hour < 24 && minute < 60 && second < 60 && parts.next().is_none();
    is_valid.then_some(3600 * hour + 60 * minute + second)
}

/// An instant: RFC 3339, or `YYYY-MM-DD HH:MM[:SS]` in local time. None if the text is none.
pub fn instant(text: &str, offset: Offset<'_>) -> Option<i64> {
    let text = text.trim();
    if !text.is_ascii() || text.len() < 11 {
        return None;
    }
    let (date_text, rest) = text.split_at(10);
    let mut parts = date_text.split('-');
    let (year, month, day) = (number(parts.next()?, 4)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let on = days(year, month, day);
    if date(on) != (year, month, day) {
        return None;
    }
    let rest = rest.strip_prefix(['T', 't', ' '])?.trim();
    let begin = on * DAY_S;
    if let Some(utc) = rest.strip_suffix(['Z', 'z']) {
        return Some(begin + clock(utc.trim())?);
    }
    match rest.rfind(['+', '-']) {
        Some(at) => {
            let sign = if rest.as_bytes()[at] == b'+' { 1 } else { -1 };
            let zone = &rest[at + 1..];
            let zone =
                if zone.contains(':') { zone.to_owned() } else { format!("{}:{}", zone.get(..2)?, zone.get(2..)?) };
            Some(begin + clock(rest[..at].trim())? - sign * clock(&zone)?)
        }
        None => Some(of_local(begin + clock(rest)?, offset)),
    }
}

/// A deadline: an instant, `+6h`, `Fri 08:00` or `08:00`, the last two being the next time at which
/// local clocks show that.
///
/// # Errors
///
/// A text of another form, or a time that is over.
pub fn deadline(text: &str, now: i64, offset: Offset<'_>) -> Result<i64, QueueError> {
    let refused = || QueueError::Refused(format!("{text:?} is no time: write {FORMS}"));
    let text = text.trim();
    if let Some(rest) = text.strip_prefix('+') {
        let unit = rest.chars().last().ok_or_else(refused)?;
        let seconds = match unit {
            'm' => 60.0,
            'h' => 3600.0,
            'd' => 86_400.0,
            _ => return Err(refused()),
        };
        let count: f64 = rest[..rest.len() - 1].parse().map_err(|_| refused())?;
        if !(count > 0.0 && count * seconds < 1e10) {
            return Err(refused());
        }
        return Ok(now + (count * seconds).ceil() as i64);
    }
    if let Some(at) = instant(text, offset) {
        if at <= now {
            let (then, now) = (format(at, offset), format(now, offset));
            return Err(QueueError::Refused(format!("{text:?} is in the past: it was {then}, and it is {now} now")));
        }
        return Ok(at);
    }
    let mut words = text.split_whitespace();
    let (first, second) = (words.next().ok_or_else(refused)?, words.next());
    let (weekday, time) = match second {
        Some(time) => (Some(first), time),
        None => (None, first),
    };
    let of_day = clock(time).filter(|_| words.next().is_none()).ok_or_else(refused)?;
    let wanted = match weekday {
        None => None,
        Some(name) => {
            let short = name.get(..3).ok_or_else(refused)?;
            Some(WEEKDAYS.iter().position(|day| day.eq_ignore_ascii_case(short)).ok_or_else(refused)? as i64)
        }
    };
    let today = (now + offset(now)).div_euclid(DAY_S);
    let matching = (today..today + 9).filter(|day| wanted.is_none_or(|wanted| day.rem_euclid(7) == wanted));
    let times = matching.map(|day| of_local(day * DAY_S + of_day, offset));
    Ok(times.into_iter().find(|time| *time > now).expect("each weekday comes within nine days"))
}

/// `Fri 2026-11-27 08:00`, in local time.
pub fn format(at: i64, offset: Offset<'_>) -> String {
    let local = at + offset(at);
    let day = local.div_euclid(DAY_S);
    let (year, month, date) = date(day);
    let minutes = local.rem_euclid(DAY_S) / 60;
    let weekday = WEEKDAYS[day.rem_euclid(7) as usize];
    format!("{weekday} {year:04}-{month:02}-{date:02} {:02}:{:02}", minutes / 60, minutes % 60)
}

/// `2026-11-27T07:00:00Z`.
pub fn rfc3339(at: i64) -> String {
    let (year, month, date) = date(at.div_euclid(DAY_S));
    let second = at.rem_euclid(DAY_S);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR: i64 = 3600;

    /// Central Europe in 2026: an hour ahead, two in summer (29 March 01:00 UTC to 25 October 01:00
    /// UTC).
    fn berlin(at: i64) -> i64 {
        if (1_774_746_000..1_792_890_000).contains(&at) { 2 * HOUR } else { HOUR }
    }

    #[test]
    fn instants_in_every_form() {
        let at = 1_795_766_400; // 2026-11-27T08:00:00Z
        for (text, expected) in [
            ("2026-11-27T08:00:00Z", Some(at)),
            ("2026-11-27 08:00Z", Some(at)),
            ("2026-11-27T09:00:00+01:00", Some(at)),
            ("2026-11-27T03:30:00-0430", Some(at)),
            ("2026-11-27T08:00:00.250Z", Some(at)),
            ("2026-11-27 09:00", Some(at)),
            ("2026-07-01 09:00", Some(1_782_889_200)),
            ("2026-02-29 09:00", None),
            ("2026-11-27 24:00", None),
            ("2026-11-27", None),
            ("27.11.2026 09:00", None),
            ("noon", None),
            ("2026-11-27 09:00 +", None),
            ("", None),
        ] {
            assert_eq!(instant(text, &berlin), expected, "{text}");
        }
        assert_eq!(format(at, &berlin), "Fri 2026-11-27 09:00");
        assert_eq!(rfc3339(at), "2026-11-27T08:00:00Z");
    }

    #[test]
    fn deadlines_in_every_form() {
        let now = 1_795_766_400; // Friday 09:00 in Berlin
        for (text, expected) in [
            ("+6h", now + 6 * HOUR),
            ("+90m", now + 5400),
            ("+1.5d", now + 36 * HOUR),
            ("+0.00001h", now + 1),
            ("Fri 09:30", now + 1800),
            ("fri 9:30", now + 1800),
            ("Friday 09:00", now + WEEK_S),
            ("Mon 08:00", now + 71 * HOUR),
            ("08:00", now + 23 * HOUR),
            ("2026-11-28 09:00", now + DAY_S),
        ] {
            assert_eq!(deadline(text, now, &berlin).unwrap(), expected, "{text}");
        }
        for (text, says) in [
            ("2026-11-27 08:59", "is in the past: it was Fri 2026-11-27 08:59, and it is Fri 2026-11-27 09:00 now"),
            ("-6h", "is no time"),
            ("+h", "is no time"),
            ("+6w", "is no time"),
            ("+-6h", "is no time"),
            ("Fro 08:00", "is no time"),
            ("é 08:00", "is no time"),
            ("Fri 25:00", "is no time"),
            ("", "is no time"),
            ("tomorrow", "`Fri 08:00`"),
        ] {
            let error = deadline(text, now, &berlin).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn a_weekday_is_at_its_local_time_across_a_change_of_the_clock() {
        // Saturday 24 October 2026, 12:00 in Berlin; clocks go back in the night.
        let now = 1_792_836_000;
        assert_eq!(deadline("Sun 12:00", now, &berlin).unwrap(), now + 25 * HOUR);
    }

    proptest! {
        #[test]
        fn dates_come_back(day in -1_000_000i64..1_000_000) {
            let (year, month, of_month) = date(day);
            prop_assert_eq!(days(year, month, of_month), day);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _ = instant(&text, &berlin);
            let _ = deadline(&text, 0, &berlin);
        }

        #[test]
        fn what_is_written_is_read(at in 0i64..4_000_000_000) {
            prop_assert_eq!(instant(&rfc3339(at), &berlin), Some(at));
        }
    }
}
