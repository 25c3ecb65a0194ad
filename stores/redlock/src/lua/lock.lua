-- Locks this node. KEYS: L, V, counter; ARGV: attempt, round, ttl in ms, the age in ms from which the node votes, the holder.
-- Returns 0 and the view of another holder; 1, the counter, the clock and the attempt's fence; 2 if the node is too young; 3 if
-- the round is over; 4 and the reason if the attempt was revoked.
local attempt, round, ttl, age = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local known = redis.call('MGET', KEYS[3], TOMBSTONE .. attempt)
local now, counter = now_us(), tonumber(known[1] or '0')
-- The request was released before it arrived, so no caller waits for it.
if round <= tonumber(known[2] or '-1') then return { 3 } end
local value = redis.call('GET', KEYS[1])
if value and value ~= attempt then
  local other = vote(KEYS[2], value)
  if other and redis.call('PTTL', KEYS[1]) > other.ttl then
    -- The wall clock was set back. A holder that is alive has renewed within its ttl, and has no more than that left.
    redis.call('PEXPIRE', KEYS[1], other.ttl)
    redis.call('PEXPIRE', KEYS[2], other.ttl)
  end
  return { 0, seen(KEYS[1], KEYS[2], value) }
end
local v = { round = round, fence = 0, since = now, ttl = tonumber(ttl), info = ARGV[5] }
if value then
  -- The same attempt again keeps its fence, and its lease restarts. A later round of the attempt takes precedence.
  local known = vote(KEYS[2], attempt)
  if known then
    -- A revoked holder cannot resume its attempt. A vote without a fence was never a grant.
    if known.reason and known.fence > 0 then return { 4, known.reason } end
    if known.round > round then return { 3 } end
    v.fence, v.since = known.fence, known.since
  end
  redis.call('SET', KEYS[1], attempt, 'PX', ttl)
else
  if age > 0 then
    -- A node that restarted empty may have lost a lock that is still held, so it does not vote until every such lock has
    -- expired. Both ends of the uptime are rounded down to seconds, so one second may be missing. The uptime is negative if
    -- the clock was set back to before the start.
    local up = tonumber(string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(-?%d+)')) - 1
    if up * 1000 < age then return { 2, up } end
  end
  redis.call('SET', KEYS[1], attempt, 'NX', 'PX', ttl)
end
redis.call('SET', KEYS[2], text(attempt, v), 'PX', ttl)
return { 1, counter, now, v.fence }
