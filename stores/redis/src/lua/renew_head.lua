-- Renews many holds, or confirms hand-offs. KEYS: counter, watched, waited, then L of each name; ARGV: the base, the claim, the client, then
-- for each hold its attempt and how many names it has. A reply is 1, 0 if the hold is gone, or the reason of its revoke.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local BASE, client = ARGV[1], ARGV[3]
local answers, rest, handed_off = {}, {}, {}
-- How many keys the fast path reads at once: Lua's stack is limited.
local MOST_KEYS = 1000

-- The fast path: plain holds that are not revoked, while no client watches.
local values = redis.call('MGET', WATCHED, unpack(KEYS, 4, math.min(#KEYS, MOST_KEYS)))
local now, at = nil, 4
for i = 4, #ARGV, 2 do
  local attempt, count, value = ARGV[i], tonumber(ARGV[i + 1]), values[at - 2]
  local nth, good = #answers + 1, false
  local plain = count == 1 and value and not values[1] and #value > 114 and string.sub(value, 1, 32) == attempt
  if plain and string.byte(value, 33) <= 1 then
    if not now then
      local time = redis.call('TIME')
      now = math.floor((time[1] * 1000000 + time[2]) / 1000)
      -- A full server rejects the first write of a script if that write needs memory: see `press_on`.
      redis.call('PERSIST', COUNTER)
    end
    good = struct.unpack('>d', value, 42) > now
  end
  if good then
    local ttl = struct.unpack('>I4', value, 98)
    if string.byte(value, 33) == 1 then handed_off[#handed_off + 1] = attempt end
    redis.call('SET', KEYS[at], attempt .. '\0' .. string.sub(value, 34, 41) .. struct.pack('>d', now + ttl)
      .. string.sub(value, 50), 'PX', ttl)
  else
    rest[#rest + 1] = { nth, attempt, at, count }
  end
  answers[nth] = good and 1 or 0
  at = at + count
end
-- The poll of the process must not find their hand-offs again.
if #handed_off > 0 then redis.call('SREM', BASE .. 'unconfirmed:' .. client, unpack(handed_off)) end
if #rest == 0 then return answers end
local CLAIM = tonumber(ARGV[2])
