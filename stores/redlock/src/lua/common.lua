-- A lock at one node is two keys. L is what every Redlock client sets: it holds the attempt of whoever has the lock here.
-- V, beside it and with the same end, is what we know of our own vote: the attempt, the number of the round, the fence
-- (0 while it is not chosen), since when, the ttl in ms, and who. A V whose attempt is not the value of L is a leftover.
-- The reason of a revoked hold stands before who, with its length: so a renewal reads it with V, and it ends with V.
--
-- A script that changes one lock makes all its reads before its first write, and the node refuses its writes together: so
-- a script that ends in an error has written nothing. (A read fails for a key of another type; a write fails for a full
-- disk or memory, at a replica, with too few replicas. None of these begins or ends while a script runs.)

-- Where a release notes that requests of its attempt may still arrive: the newest round of them. It ends when none can.
local TOMBSTONE = 'lockkeeper:{all}:ended:'

-- What a key holds. A key of another type is another program's: it holds a value, and not ours.
local function value_of(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'table' then return value end
  if string.find(value.err, 'WRONGTYPE', 1, true) then return '' end
  error(value)
end

local function vote(key, attempt)
  local who, round, fence, since, ttl, info =
    string.match(value_of(key) or '', '^(%x+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  if who ~= attempt then return nil end
  local length, rest = string.match(info, '^!(%d+):(.*)$')
  local reason = length and string.sub(rest, 1, tonumber(length))
  if length then info = string.sub(rest, tonumber(length) + 1) end
  return { round = tonumber(round), fence = tonumber(fence), since = tonumber(since), ttl = tonumber(ttl), info = info,
    reason = reason }
end

local function reason_and_info(v)
  return v.reason and string.format('!%d:', #v.reason) .. v.reason .. v.info or v.info
end

local function text(attempt, v)
  return string.format('%s %.0f %.0f %.0f %.0f ', attempt, v.round, v.fence, v.since, v.ttl) .. reason_and_info(v)
end

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The counter has no expiry: dying with a lock, it would let the fence go back.
local function raise(counter, fence)
  if tonumber(redis.call('GET', counter) or '0') < fence then
    redis.call('SET', counter, string.format('%.0f', fence))
  end
end

-- Notifies waiters. Without the right to publish they poll; the release itself has happened.
local function publish(channel, fence)
  redis.pcall('PUBLISH', channel, string.format('%.0f', fence))
end

-- How long L lasts, in ms. Redis counts it by the wall clock: more than the ttl is left only if that was set back.
local function left(lock, v)
  local ms = redis.call('PTTL', lock)
  return v and ms > v.ttl and v.ttl or ms
end

-- What others may see of L: which holder (not its attempt, which is a secret), for how long, and what V says.
local function seen(lock, key, value)
  local v = vote(key, value)
  local shown = v and string.format('%.0f %.0f ', v.fence, v.since) .. reason_and_info(v) or ''
  return { redis.sha1hex(value), left(lock, v), shown }
end
