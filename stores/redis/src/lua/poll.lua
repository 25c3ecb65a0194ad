local answer = { redis.call('PEXPIRE', BASE .. 'client:' .. ARGV[3], CLAIM), 0 }
local keys = names_at(5, #KEYS - 4)
stay(keys)
serve(keys)
flush()
for i, key in ipairs(names_at(5, #KEYS - 4)) do
  answer[i + 2] = { redis.call('GET', key) or '', redis.call('HGET', HELD, key) or '',
    redis.call('PTTL', key) }
end
answer[2] = tonumber(redis.call('GET', COUNTER) or '0')
return answer
