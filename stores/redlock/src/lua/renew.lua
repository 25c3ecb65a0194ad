-- Renews many. KEYS: counter, then L and V of each; ARGV: for each its attempt, ttl in ms and fence.
-- Returns for each: 1 renewed, 0 locked by another holder, 2 not locked, or the reason if it was revoked and not renewed.
local answers = {}
for i = 1, #ARGV / 3 do
  local lock, key = KEYS[2 * i], KEYS[2 * i + 1]
  local attempt, ttl, fence = ARGV[3 * i - 2], ARGV[3 * i - 1], tonumber(ARGV[3 * i])
  local value = value_of(lock)
  local v = value == attempt and vote(key, attempt)
  if v and v.reason then
    answers[i] = v.reason
  elseif value == attempt then
    redis.call('PEXPIRE', lock, ttl)
    redis.call('PEXPIRE', key, ttl)
    if v and v.fence < fence then
      v.fence = fence
      redis.call('SET', key, text(attempt, v), 'PX', ttl)
    end
    answers[i] = 1
  else
    answers[i] = value and 0 or 2
  end
  -- A node that restarted empty gets the fence by this, whichever client holds the lock.
  raise(KEYS[1], fence)
end
return answers
