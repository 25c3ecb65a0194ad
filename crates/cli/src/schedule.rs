//! When a job is due: the five fields of a crontab, in a time zone.
//!
//! Our own parser, because it is this one page, and because what happens when clocks are changed must be exactly this: a
//! time that does not exist is due at the moment the clocks are set forward; a time that exists twice is due the first time.

use std::time::Duration;

use jiff::civil::{Date, DateTime};
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp, ToSpan};
use lockkeeper::Outcome;

use crate::exit::ExitFailure;
use crate::text::plain;

/// The longest that two runs can be apart: 29 February, over a year that is no leap year. Beyond it there is no such day.
const YEARS: i16 = 9;

/// How far back missed runs are looked for.
const LOOK_BACK: SignedDuration = SignedDuration::from_hours(366 * 24);

/// Five fields, in a zone.
#[derive(Clone, Debug)]
pub struct Schedule {
    minutes: Vec<i8>,
    hours: Vec<i8>,
    days: Field,
    months: Field,
    weekdays: Field,
    zone: TimeZone,
}

/// The numbers of a field, and whether it was left open: of days and weekdays only those that were not count.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Field {
    numbers: Vec<i8>,
    open: bool,
}

const MONTHS: [&str; 12] =
    ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"];
const WEEKDAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

impl Schedule {
    pub fn new(text: &str, zone: TimeZone) -> Result<Schedule, String> {
        let fields: Vec<&str> = text.split_whitespace().collect();
        let [minutes, hours, days, months, weekdays] = fields[..] else {
            let n = fields.len();
            return Err(format!(
                "{n} fields: minute, hour, day, month and weekday are needed, as in '0 2 * * *'"
            ));
        };
        let mut weekdays = field("weekday", weekdays, 0, 7, &WEEKDAYS, 0)?;
        // Sunday is 0, and 7 as well.
        weekdays.numbers.iter_mut().for_each(|n| *n %= 7);
        let schedule = Schedule {
            minutes: field("minute", minutes, 0, 59, &[], 0)?.numbers,
            hours: field("hour", hours, 0, 23, &[], 0)?.numbers,
            days: field("day", days, 1, 31, &[], 0)?,
            months: field("month", months, 1, 12, &MONTHS, 1)?,
            weekdays,
            zone,
        };
        let start = Timestamp::UNIX_EPOCH;
        schedule.after(start).ok_or_else(|| format!("there is no such day: {text:?} is never due"))?;
        Ok(schedule)
    }

    /// The zone as the database spells it.
    pub fn zone_name(&self) -> Option<&str> {
        self.zone.iana_name()
    }

    /// The next moment after `after` at which it is due.
    pub fn after(&self, after: Timestamp) -> Option<Timestamp> {
        let first = after.to_zoned(self.zone.clone()).date();
        // A gap at midnight can move a time of yesterday into today.
        let mut date = first.yesterday().unwrap_or(first);
        let last = first.checked_add(YEARS.years()).ok()?;
        while date <= last {
            if self.has(date)
                && let Some(due) = self.times(date).filter(|due| *due > after).min()
            {
                return Some(due);
            }
            date = date.tomorrow().ok()?;
        }
        None
    }

    /// The moments between the two at which it was due, oldest first; at most a year is looked back.
    pub fn between(&self, after: Timestamp, before: Timestamp) -> Vec<Timestamp> {
        let first = before.checked_sub(LOOK_BACK).map_or(after, |early| early.max(after));
        let date = |at: Timestamp| at.to_zoned(self.zone.clone()).date();
        let mut day = date(first).yesterday().unwrap_or(date(first));
        let mut found = Vec::new();
        while day <= date(before) {
            if self.has(day) {
                found.extend(self.times(day).filter(|due| *due > first && *due < before));
            }
            let Ok(next) = day.tomorrow() else { break };
            day = next;
        }
        found.sort();
        found.dedup();
        found
    }

    /// Whether it is due on this day. With both a day and a weekday given, either will do, as in every crontab.
    fn has(&self, date: Date) -> bool {
        let day = self.days.numbers.contains(&date.day());
        let weekday = self.weekdays.numbers.contains(&date.weekday().to_sunday_zero_offset());
        let fits = if self.days.open || self.weekdays.open { day && weekday } else { day || weekday };
        fits && self.months.numbers.contains(&date.month())
    }

    /// The moments of this day at which it is due.
    fn times(&self, date: Date) -> impl Iterator<Item = Timestamp> {
        let at = move |(hour, minute): (i8, i8)| moment(&self.zone, date.at(hour, minute, 0, 0));
        self.hours.iter().flat_map(|h| self.minutes.iter().map(|m| (*h, *m))).filter_map(at)
    }
}

/// When a clock on the wall shows this. A time that does not exist is the moment at which the clocks are set forward; one that
/// exists twice is the first.
fn moment(zone: &TimeZone, time: DateTime) -> Option<Timestamp> {
    let ambiguous = zone.to_ambiguous_timestamp(time);
    match ambiguous.offset() {
        AmbiguousOffset::Gap { .. } => {
            // Where the clocks were set forward: the last change before the time that comes after the gap.
            let beyond = ambiguous.compatible().ok()?.checked_add(1.nanosecond()).ok()?;
            zone.preceding(beyond).next().map(|change| change.timestamp())
        }
        _ => ambiguous.earlier().ok(),
    }
}

/// A zone by its name; what is wrong with it, and what to do, otherwise.
pub fn zone(name: &str) -> Result<TimeZone, ExitFailure> {
    TimeZone::get(name).map_err(|e| {
        ExitFailure::new(Outcome::Invalid, format!("--zone {}: {e}", plain(name)))
            .next("name one of /usr/share/zoneinfo (Debian package tzdata), or UTC")
    })
}

/// Windows of whole days in a zone, counted from 1 January 1970 there: each begins at midnight.
#[derive(Clone, Debug)]
pub struct DayWindows {
    count: i32,
    zone: TimeZone,
}

impl DayWindows {
    /// `None` if a window of this length is not one of whole days.
    pub fn new(window: Duration, zone: TimeZone) -> Option<DayWindows> {
        let (day, secs) = (24 * 60 * 60, window.as_secs());
        let whole = secs > 0 && secs % day == 0 && window.subsec_nanos() == 0;
        let count = i32::try_from(secs / day).ok().filter(|_| whole)?;
        Some(DayWindows { count, zone })
    }

    /// The zone as the database spells it: two hosts that write it in different case mean the same.
    pub fn zone_name(&self) -> Option<&str> {
        self.zone.iana_name()
    }

    /// When the window begins that `at` is in.
    pub fn begin(&self, at: Timestamp) -> Option<Timestamp> {
        self.midnight(self.number(at)?)
    }

    /// The windows between the two, oldest first.
    pub fn between(&self, after: Timestamp, before: Timestamp) -> Vec<Timestamp> {
        let (Some(first), Some(last)) = (self.number(after), self.number(before)) else { return Vec::new() };
        let all = (first..=last).filter_map(|number| self.midnight(number));
        all.filter(|begin| *begin > after && *begin < before).collect()
    }

    /// The how-manieth window `at` is in.
    fn number(&self, at: Timestamp) -> Option<i32> {
        let date = at.to_zoned(self.zone.clone()).date();
        let days = date.since((jiff::Unit::Day, EPOCH)).ok()?.get_days();
        Some(days.div_euclid(self.count))
    }

    fn midnight(&self, number: i32) -> Option<Timestamp> {
        let date = EPOCH.checked_add(number.checked_mul(self.count)?.days()).ok()?;
        moment(&self.zone, date.at(0, 0, 0, 0))
    }
}

/// The day that windows are counted from.
const EPOCH: Date = Date::constant(1970, 1, 1);

fn field(what: &str, text: &str, least: i8, most: i8, names: &[&str], first: i8) -> Result<Field, String> {
    let bad = |part: &str| format!("{part:?} is no {what}: {least} to {most}, as in 5, 1-5, */10 or 1,15");
    let number = |word: &str| {
        let named = names.iter().position(|name| name.eq_ignore_ascii_case(word));
        let n = match named {
            Some(at) => first + at as i8,
            None => word.parse().map_err(|_| bad(word))?,
        };
        if (least..=most).contains(&n) { Ok(n) } else { Err(bad(word)) }
    };
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => {
                (range, step.parse::<u8>().ok().filter(|n| *n > 0).ok_or_else(|| bad(part))?)
            }
            None => (part, 1),
        };
        let (from, to) = match range.split_once('-') {
            _ if range == "*" => (least, most),
            Some((from, to)) => (number(from)?, number(to)?),
            None if step > 1 => (number(range)?, most),
            None => (number(range)?, number(range)?),
        };
        if from > to {
            return Err(format!("{range:?} runs backwards: write the smaller {what} first"));
        }
        numbers.extend((from..=to).step_by(step.into()));
    }
    Ok(Field { numbers, open: text.starts_with('*') })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next `n` times after `after`, in UTC.
    fn due(text: &str, zone: &TimeZone, after: &str, n: usize) -> Vec<String> {
        let schedule = Schedule::new(text, zone.clone()).unwrap();
        let first: Timestamp = after.parse().unwrap();
        let next = |last: &Timestamp| schedule.after(*last);
        std::iter::successors(Some(first), next).skip(1).take(n).map(|t| t.to_string()).collect()
    }

    #[test]
    fn the_five_fields_mean_what_they_mean_in_a_crontab() {
        let utc = TimeZone::UTC;
        assert_eq!(
            due("0 2 * * *", &utc, "2026-11-16T02:00:00Z", 2),
            ["2026-11-17T02:00:00Z", "2026-11-18T02:00:00Z"]
        );
        assert_eq!(due("*/20 * * * *", &utc, "2026-11-16T02:00:01Z", 3)[2], "2026-11-16T03:00:00Z");
        assert_eq!(due("30 6 * * mon-fri", &utc, "2026-11-13T07:00:00Z", 1), ["2026-11-16T06:30:00Z"]);
        assert_eq!(due("0 0 * * 7", &utc, "2026-11-16T00:00:00Z", 1), ["2026-11-22T00:00:00Z"]);
        // A day and a weekday: either will do.
        assert_eq!(
            due("0 0 1 * fri", &utc, "2026-11-26T00:00:00Z", 2),
            ["2026-11-27T00:00:00Z", "2026-12-01T00:00:00Z"]
        );
        assert_eq!(due("0 0 29 feb *", &utc, "2026-01-01T00:00:00Z", 1), ["2028-02-29T00:00:00Z"]);
        assert_eq!(due("5/25 1,3 * * *", &utc, "2026-11-16T01:30:00Z", 2)[1], "2026-11-16T03:05:00Z");
    }

    #[test]
    fn what_was_missed_is_all_that_was_due_between() {
        let hourly = Schedule::new("0 * * * *", TimeZone::UTC).unwrap();
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let missed = hourly.between(at("2026-11-15T22:00:00Z"), at("2026-11-16T01:00:00Z"));
        assert_eq!(missed, [at("2026-11-15T23:00:00Z"), at("2026-11-16T00:00:00Z")]);
        assert_eq!(hourly.between(at("2026-11-16T00:00:00Z"), at("2026-11-16T01:00:00Z")), []);
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        for (text, why) in [
            ("0 2 * *", "4 fields"),
            ("60 2 * * *", "no minute"),
            ("0 24 * * *", "no hour"),
            ("0 0 0 * *", "no day"),
            ("0 0 31 feb *", "never due"),
            ("0 0 * * sunny", "no weekday"),
            ("*/0 * * * *", "no minute"),
            ("5-1 * * * *", "backwards"),
            ("", "0 fields"),
        ] {
            let error = Schedule::new(text, TimeZone::UTC).unwrap_err();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    /// Berlin's rule, written out: no time-zone database is needed for it.
    fn berlin() -> TimeZone {
        TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    #[test]
    fn a_time_that_does_not_exist_is_due_when_the_clocks_are_set_forward() {
        // On 29 March 2026 at 02:00 it is 03:00 at once: 01:00 in UTC.
        assert_eq!(
            due("30 2 * * *", &berlin(), "2026-03-28T12:00:00Z", 2),
            ["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"]
        );
        // Several of them are due together, which is once; and 03:00 is that moment, too.
        assert_eq!(
            due("0,30 2,3 * * *", &berlin(), "2026-03-28T12:00:00Z", 3),
            ["2026-03-29T01:00:00Z", "2026-03-29T01:30:00Z", "2026-03-30T00:00:00Z"]
        );
    }

    #[test]
    fn a_time_that_exists_twice_is_due_once() {
        // On 25 October 2026 there are two 02:30: 00:30 and 01:30 in UTC.
        assert_eq!(
            due("30 2 * * *", &berlin(), "2026-10-24T12:00:00Z", 2),
            ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]
        );
    }

    /// When the windows of the days around `at` begin, in UTC.
    fn days(count: u64, at: &str) -> Vec<String> {
        let days = DayWindows::new(Duration::from_secs(count * 86_400), berlin()).unwrap();
        let at: Timestamp = at.parse().unwrap();
        let around = (at - SignedDuration::from_hours(36), at + SignedDuration::from_hours(36));
        days.between(around.0, around.1).iter().map(Timestamp::to_string).collect()
    }

    #[test]
    fn a_day_of_a_zone_begins_at_its_midnight_also_when_clocks_are_changed() {
        // 23 hours, and 25.
        assert_eq!(
            days(1, "2026-03-29T12:00:00Z"),
            ["2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z", "2026-03-30T22:00:00Z"]
        );
        assert_eq!(
            days(1, "2026-10-25T12:00:00Z"),
            ["2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z", "2026-10-26T23:00:00Z"]
        );
        // Half past one in the night: by UTC two of these three are on one day.
        let one = DayWindows::new(Duration::from_secs(86_400), berlin()).unwrap();
        let nights = ["2026-03-28T00:30:00Z", "2026-03-29T00:30:00Z", "2026-03-29T23:30:00Z"];
        let begins = nights.map(|at| one.begin(at.parse().unwrap()).unwrap().to_string());
        assert_eq!(begins, ["2026-03-27T23:00:00Z", "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z"]);
        assert!(DayWindows::new(Duration::from_secs(3600), berlin()).is_none());
        assert_eq!(days(7, "2026-11-19T12:00:00Z"), ["2026-11-18T23:00:00Z"]);
    }
}
